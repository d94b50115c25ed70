"""An executor's side of Flower's Runtime API: ask for a task, read its input, answer.

A SuperLink or SuperNode started with `--isolation process` hands its tasks to whoever asks with the right secret.
Flower's own executor starts a new Python process per task and runs the uploaded code in it; here a warm process answers
with installed code, and the uploaded archive is not even looked at.

A task belongs to whoever has its token, for as long as heartbeats come (a minute's grace). So a token that was written
down lets a restarted process go on where it was killed.
"""

import base64
import json
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx
from flwr.app import Context, Message
from flwr.app.message import remove_content_from_message
from flwr.common.constant import SubStatus
from flwr.common.serde import context_from_proto, message_from_proto, message_to_proto, run_from_proto
from flwr.proto.log_pb2 import PushLogsRequest
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.proto.message_pb2 import ObjectTree, PullObjectRequest
from flwr.proto.node_pb2 import Node
from flwr.proto.runtime_pb2 import (
    AcquireTaskRequest,
    PullAppMessagesRequest,
    PullTaskInputRequest,
    PushAppMessagesRequest,
    PushTaskOutputRequest,
    SendTaskHeartbeatRequest,
)
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_protobuf_utils import (
    make_confirm_message_received_fn_protobuf,
    make_pull_object_fn_protobuf,
    make_push_object_fn_protobuf,
)
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError
from flwr.supercore.interceptors import (
    RuntimeTokenHttpInterceptor,
    RuntimeVersionHttpInterceptor,
    SuperExecAuthHttpInterceptor,
)
from flwr.supercore.protobuf.client import ProtobufClientInterceptor
from flwr.supercore.retry import RetryInvoker, exponential
from flwr.supercore.run import Run
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity

from fedplat.errors import FedplatError
from fedplat.files import write_file
from fedplat.flower import require_checked_version
from fedplat.flower.objects import pull_message, push_objects

CLIENT_TASK, SERVER_TASK = "flwr-clientapp", "flwr-serverapp"
HEARTBEAT_S = 10.0
SOON_S = 10.0
PATIENCE_S = 120.0
"""How long a call may be tried again before whoever is behind the API counts as gone."""
GONE = (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN)


class TaskLost(FedplatError):
    """The task is no longer ours: its run was stopped, or whoever gave it has forgotten it."""


class MessageLost(FedplatError):
    """The task is ours, but the content of its message is gone."""


class RunStopped(KeyboardInterrupt):
    """The run was ended behind our back: by an operator, or because the SuperLink took us for dead."""


@dataclass(frozen=True)
class RuntimeApi:
    """Where tasks come from, and what proves that we may have them."""

    address: str
    root_certificates: bytes
    secret: bytes

    def client(self, component: str, *extra: ProtobufClientInterceptor) -> RuntimeHttpClient:
        require_checked_version()
        return RuntimeHttpClient.from_server_address(
            server_address=self.address,
            insecure=False,
            root_certificates=self.root_certificates,
            interceptors=[RuntimeVersionHttpInterceptor(component_name=component), *extra],
            retry_invoker=patient_invoker(),
        )


def patient_invoker(patience_s: float = PATIENCE_S) -> RetryInvoker:
    """Try again while the other side is away, up to a deadline.

    Flower's own invoker waits for ever, and ends the whole process when a token is refused.
    """

    def hopeless(error: Exception) -> bool:
        return isinstance(error, httpx.HTTPStatusError) and error.response.status_code < 500

    return RetryInvoker(
        wait_gen_factory=lambda: exponential(max_delay=2),
        recoverable_exceptions=(httpx.TransportError, httpx.HTTPStatusError),
        max_tries=None,
        max_time=patience_s,
        should_giveup=hopeless,
    )


class TaskQueue:
    """Asks for tasks of one type."""

    def __init__(self, api: RuntimeApi, task_type: str) -> None:
        auth = SuperExecAuthHttpInterceptor(
            master_secret=api.secret, protected_methods=frozenset({"/flwr.proto.Runtime/AcquireTask"})
        )
        self._type = task_type
        self._client = api.client("SuperExec", auth)

    def acquire(self) -> str | None:
        """The token of a pending task, if there is one."""
        response = self._client.AcquireTask(AcquireTaskRequest(supported_task_types=[self._type]))
        return response.token if response.HasField("task") and response.token else None

    def close(self) -> None:
        self._client.close()


class Heartbeat:
    """Keeps a task ours while it is worked on."""

    def __init__(self, client: RuntimeHttpClient) -> None:
        self._client, self._over = client, threading.Event()
        self._thread = threading.Thread(target=self._beat, name="task-heartbeat", daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        while not self._over.wait(HEARTBEAT_S):
            try:
                self._client.SendTaskHeartbeat(SendTaskHeartbeatRequest())
            except (httpx.HTTPError, RuntimeError):
                continue  # the next call of the task itself finds out what is wrong

    def stop(self) -> None:
        self._over.set()


class Task:
    """A task whose token we have. Leaving the block ends the heartbeat, not the task."""

    def __init__(self, api: RuntimeApi, token: str, component: str) -> None:
        self.token, self.task_id = token, 0
        self.client = api.client(component, RuntimeTokenHttpInterceptor(token))

    def __enter__(self) -> Self:
        self._heartbeat = Heartbeat(self.client)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._heartbeat.stop()
        self.client.close()

    def pull_input(self) -> tuple[Context, Run]:
        """What the task is about. The archive that came with it is dropped unread."""
        try:
            response = self.client.PullTaskInput(PullTaskInputRequest())
        except httpx.HTTPStatusError as error:
            raise TaskLost(f"the task can't be started: {error.response.text[:200]}") from None
        context, run = context_from_proto(response.context), run_from_proto(response.run)
        self.resume(response.task_id, run.run_id, context.node_id)
        return context, run

    def resume(self, task_id: int, run_id: int, node_id: int) -> None:
        """Become the task that this token stands for: whoever makes messages does so in its name."""
        self.task_id = task_id
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = task_id, run_id, node_id

    def finish(self, error: str | None = None) -> None:
        """Report the end of the task; what the context holds is nobody's business and stays here."""
        status = SubStatus.COMPLETED if error is None else SubStatus.FAILED
        try:
            self.client.PushTaskOutput(PushTaskOutputRequest(sub_status=status, details=error or ""))
        except httpx.HTTPStatusError as refused:
            if refused.response.status_code not in GONE:
                raise

    def push_log(self, run_id: int, line: str) -> None:
        self.client.PushLogs(PushLogsRequest(node=Node(node_id=0), run_id=run_id, logs=[line]))


@dataclass(frozen=True)
class Assignment:
    """A client task with the message it is about, in a form that survives a crash."""

    token: str
    task_id: int
    run_id: int
    node_id: int
    message_id: str
    envelope: str
    """The message without its content, base64."""
    tree: str
    """The message's object tree, base64."""
    run_config: dict[str, bool | float | int | str]
    tries: int = 1
    """How often it was begun: one that ends the process again and again is given up."""

    def save(self, path: Path) -> None:
        write_file(path, json.dumps(self.__dict__).encode(), mode=0o600)

    @classmethod
    def load(cls, path: Path) -> "Assignment | None":
        try:
            return cls(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError):
            return None

    def empty_message(self) -> Message:
        """The message as far as an answer needs it: who sent it, and what kind it is."""
        message = message_from_proto(ProtoMessage.FromString(base64.b64decode(self.envelope)))
        message.metadata.__dict__["_message_id"] = self.message_id
        return message

    def object_tree(self) -> ObjectTree:
        tree: ObjectTree = ObjectTree.FromString(base64.b64decode(self.tree))
        return tree

    def object_ids(self) -> list[str]:
        """The parts of the message, each once."""
        return list(dict.fromkeys(part.object_id for part in iterate_object_tree(self.object_tree())))


class ClientTask(Task):
    """One message for a client, from a SuperNode."""

    def __init__(self, api: RuntimeApi, token: str) -> None:
        super().__init__(api, token, "flwr-clientapp")

    def pull_assignment(self) -> Assignment:
        """What is asked. A SuperNode announces a task a moment before it has the message."""
        context, run = self.pull_input()
        deadline = time.monotonic() + SOON_S
        while not (response := self.client.PullMessages(PullAppMessagesRequest())).messages_list:
            if time.monotonic() > deadline:
                raise TaskLost("the task has no message")
            time.sleep(0.02)
        tree = response.message_object_trees[0]
        return Assignment(
            token=self.token,
            task_id=self.task_id,
            run_id=run.run_id,
            node_id=context.node_id,
            message_id=tree.object_id,
            envelope=base64.b64encode(response.messages_list[0].SerializeToString()).decode(),
            tree=base64.b64encode(tree.SerializeToString()).decode(),
            run_config=dict(context.run_config),
        )

    def go_on(self, assignment: Assignment) -> None:
        """Be the task of an assignment that was pulled before."""
        self.resume(assignment.task_id, assignment.run_id, assignment.node_id)

    def is_ours(self) -> bool:
        """Does whoever gave us this task still know it?"""
        try:
            return bool(self.client.SendTaskHeartbeat(SendTaskHeartbeatRequest()).success)
        except httpx.HTTPStatusError:
            return False

    def pull_message(self, assignment: Assignment, most_objects: int, most_bytes: int) -> Message:
        """The message with its content. It stays with the SuperNode until it is answered."""
        ids = assignment.object_ids()
        if len(ids) > most_objects:
            raise FedplatError(f"the message has {len(ids)} parts, more than the job's model can have: not fetched")
        pull = make_pull_object_fn_protobuf(self.client.PullObject, Node(node_id=assignment.node_id), assignment.run_id)
        try:
            return pull_message(assignment.object_tree(), pull, most_bytes)
        except (ObjectPullError, httpx.HTTPError, OSError) as error:
            raise MessageLost(f"the message can't be fetched: {type(error).__name__}: {error}") from None

    def await_message(self, assignment: Assignment) -> None:
        """Wait until the SuperNode has all of a message that we don't want, looking at one part at a time.

        It takes an answer as the end of the message, and would stumble over parts that arrive after that.
        """
        deadline = time.monotonic() + PATIENCE_S
        for object_id in assignment.object_ids():
            request = PullObjectRequest(
                node=Node(node_id=assignment.node_id), run_id=assignment.run_id, object_id=object_id
            )
            while not self.client.PullObject(request).object_available and time.monotonic() < deadline:
                time.sleep(0.05)

    def answer(self, assignment: Assignment, reply: Message) -> None:
        """Let the SuperNode forget the request, hand the reply over, end the task.

        In this order: once it has the reply it fetches the next message, which may share objects with this one, and
        forgetting those then would leave it unable to take any message with them again.
        """
        reply.metadata.__dict__["_message_id"] = reply.object_id
        node = Node(node_id=assignment.node_id)
        make_confirm_message_received_fn_protobuf(self.client.ConfirmMessageReceived, node, assignment.run_id)(
            assignment.message_id
        )
        with no_object_id_recompute():
            pushed = self.client.PushMessages(
                PushAppMessagesRequest(
                    messages_list=[message_to_proto(remove_content_from_message(reply))],
                    message_object_trees=[get_object_tree(reply)],
                )
            )
            push = make_push_object_fn_protobuf(self.client.PushObject, node, assignment.run_id, pushed.session_id)
            push_objects(get_all_nested_objects(reply), set(pushed.objects_to_push), push)
        self.finish()
