"""Flower's Grid to real nodes, with waits that end and one reply in memory at a time."""

import contextlib
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import httpx
from flwr.app import ConfigRecord, Message
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, ObjectTree, PullObjectRequest
from flwr.proto.node_pb2 import NodeInfo
from flwr.proto.runtime_pb2 import PullAppMessagesRequest, PushAppMessagesRequest
from flwr.supercore.inflatable.inflatable_object import (
    InflatableObject,
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
)
from flwr.supercore.inflatable.inflatable_protobuf_utils import (
    make_pull_object_fn_protobuf,
    make_push_object_fn_protobuf,
)
from flwr.supercore.run import Run
from flwr.superlink.grid import HttpGrid

from fedplat.flower import require_checked_version, unusable_reply
from fedplat.flower.objects import TooLarge, pull_message, push_objects
from fedplat.flower.tasks import GONE, RunStopped, RuntimeApi, patient_invoker
from fedplat.wire import payload_bytes, records

FORGET_S = 900.0
EXTRA_BYTES = 4 << 20
"""What a reply may have beyond its arrays: metrics, and what the site says of its ledger."""
CHUNK_BYTES, MOST_PARTS = 5 << 20, 4096


@dataclass(frozen=True)
class _Arriving:
    """A reply that was announced. Its parts may still be on their way, or lost with whoever sent them."""

    tree: ObjectTree
    since: float = field(default_factory=time.monotonic)


class RunGrid(HttpGrid):
    """One run's nodes."""

    def __init__(self, api: RuntimeApi, token: str, run: Run) -> None:
        require_checked_version()
        super().__init__(api.address, insecure=False, root_certificates=api.root_certificates, token=token)
        self._retry_invoker = patient_invoker()
        self._arriving: dict[str, _Arriving] = {}
        self._largest = 0
        """Bytes of the largest request of this run."""
        self.set_run(run)

    def get_nodes(self) -> Iterable[NodeInfo]:
        with _while_running():
            return super().get_nodes()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        requests = list(messages)
        self._largest = max([self._largest, *(_weight(request) for request in requests)])
        with _while_running():
            return super().push_messages(requests)

    def _try_push_messages(self, run_id: int, messages: Iterable[Message]) -> list[str]:
        """A cohort's requests share their content: it is hashed and asked about once, and serialised part by part."""
        objects: dict[str, InflatableObject] = {}
        request = PushAppMessagesRequest()
        for message in messages:
            request.messages_list.append(message_to_proto(remove_content_from_message(message)))
            request.message_object_trees.append(get_object_tree(message))
            objects.update(get_all_nested_objects(message))
        pushed = self._runtime_client.PushMessages(request)
        push = make_push_object_fn_protobuf(self._runtime_client.PushObject, self.node, run_id, pushed.session_id)
        push_objects(objects, set(pushed.objects_to_push), push)
        return list(pushed.message_ids)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """The first reply that is there as a whole, if any: a cohort of large models need not fit into memory.

        A SuperLink announces a reply before its parts have arrived. Flower's own Grid then waits, for hours if the
        sender died; here such a reply is looked at again at the next call.
        """
        wanted = list(message_ids)
        with _while_running():
            self._announced(wanted)
            for asked in wanted:
                reply = self._arriving.get(asked)
                if reply is not None and self._is_here(reply.tree.object_id):
                    del self._arriving[asked]
                    return [self._take(asked, reply.tree)]
        return []

    def _announced(self, wanted: list[str]) -> None:
        old = time.monotonic() - FORGET_S
        self._arriving = {asked: reply for asked, reply in self._arriving.items() if reply.since > old}
        unheard = [asked for asked in wanted if asked not in self._arriving]
        if not unheard:
            return
        response = self._runtime_client.PullMessages(PullAppMessagesRequest(message_ids=unheard))
        for message, tree in zip(response.messages_list, response.message_object_trees, strict=True):
            self._arriving[message.metadata.reply_to_message_id] = _Arriving(tree)

    def _is_here(self, object_id: str) -> bool:
        """The message itself is sent after its parts."""
        request = PullObjectRequest(node=self.node, run_id=self.run.run_id, object_id=object_id)
        return bool(self._runtime_client.PullObject(request).object_available)

    def _take(self, asked: str, tree: ObjectTree) -> Message:
        """The reply, or an error in its place: whatever a node sends may cost it its place, never the run."""
        ids = list(dict.fromkeys(part.object_id for part in iterate_object_tree(tree)))
        most = self._largest + self._largest // 4 + EXTRA_BYTES
        try:
            if len(ids) > 2 * (most // CHUNK_BYTES) + MOST_PARTS:
                raise TooLarge(f"the reply has {len(ids)} parts")
            pull = make_pull_object_fn_protobuf(self._runtime_client.PullObject, self.node, self.run.run_id)
            message = pull_message(tree, pull, most)
            if message.metadata.reply_to_message_id != asked:
                raise ValueError("not a reply to what was asked")
        except httpx.HTTPError:
            raise
        except Exception as error:
            return unusable_reply(asked, f"the reply can't be read: {type(error).__name__}: {error!s:.200}")
        finally:
            self._runtime_client.ConfirmMessageReceived(
                ConfirmMessageReceivedRequest(node=self.node, run_id=self.run.run_id, message_object_id=tree.object_id)
            )
        return message


def _weight(message: Message) -> int:
    """Bytes of a request: a reply is about as large."""
    configs = records(message.content, ConfigRecord).values()
    values = (value for record in configs for value in record.values() if isinstance(value, bytes))
    return payload_bytes(message.content) + sum(len(value) for value in values)


@contextlib.contextmanager
def _while_running() -> Iterator[None]:
    try:
        yield
    except httpx.HTTPStatusError as error:
        if error.response.status_code in GONE:
            raise RunStopped from None
        raise
