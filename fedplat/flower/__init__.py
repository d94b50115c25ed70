"""All use of what Flower has no public API for, in one folder and pinned to the version it was checked with.

Here: naming the task a process runs (needed before any `Message` can be made), giving a message an id, an empty
`Run`. `tasks` takes work from a SuperLink or SuperNode as its executor, `control` talks to a SuperLink as an operator.
"""

import logging
import time
import uuid
from importlib.metadata import version

from flwr.app import Context, Error, Message, RecordDict
from flwr.app.message import make_message
from flwr.app.metadata import Metadata
from flwr.common.constant import ErrorCode
from flwr.supercore.constant import SYSTEM_MESSAGE_TYPE
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from fedplat.errors import UsageError

CHECKED = "1.41."
SERVER_NODE_ID = 1
CLIENT_RAISED = 2
"""Flower's error code for an exception in a ClientApp."""


def require_checked_version() -> None:
    installed = version("flwr")
    if not installed.startswith(CHECKED):
        raise UsageError(
            f"flwr {installed} is installed; fedplat was checked with {CHECKED}*: pip install 'flwr=={CHECKED}*'"
        )


def become_server(run_id: int) -> None:
    """Let this process create messages as the server of a run."""
    require_checked_version()
    _follow_our_logging()
    TaskIdentity.task_id = run_id
    TaskIdentity.run_id = run_id
    TaskIdentity.node_id = SERVER_NODE_ID


def _follow_our_logging() -> None:
    """Flower sets its own log level when it is imported; it speaks only where we do (--verbose), each line once."""
    flower = logging.getLogger("flwr")
    flower.setLevel(logging.INFO if logging.getLogger().isEnabledFor(logging.INFO) else logging.ERROR)
    flower.propagate = False


def empty_run(run_id: int) -> Run:
    return Run.create_empty(run_id)


def stamp(message: Message) -> str:
    """Give a message the id that a SuperLink would give it."""
    message_id = uuid.uuid4().hex
    message.metadata.__dict__["_message_id"] = message_id
    return message_id


def private_copy(message: Message) -> Message:
    """The message as one client sees it: strategies send one shared content to the whole cohort."""
    content = RecordDict()
    for key, record in message.content.items():
        content[key] = record.copy()
    return message_with(content, message.metadata)


def message_with(content: RecordDict, metadata: Metadata) -> Message:
    """A message that already has its metadata."""
    message: Message = Message(content=content, metadata=metadata)  # type: ignore[call-overload]
    return message


def unavailable(message_id: str, reason: str) -> Message:
    """What Flower's own Grid makes of a reply whose content is gone."""
    about = Metadata(
        run_id=TaskIdentity.run_id or 0,
        message_id="",
        src_node_id=SERVER_NODE_ID,
        dst_node_id=SERVER_NODE_ID,
        message_type=SYSTEM_MESSAGE_TYPE,
        group_id="",
        ttl=0,
        reply_to_message_id=message_id,
        created_at=time.time(),
    )
    return make_message(metadata=about, error=Error(code=ErrorCode.MESSAGE_UNAVAILABLE, reason=reason))


def error_reply(message: Message, reason: str) -> Message:
    return Message(Error(code=CLIENT_RAISED, reason=reason), reply_to=message)


Config = dict[str, bool | float | int | str]


def new_context(run_id: int, node_id: int, node_config: Config, run_config: Config) -> Context:
    return Context(run_id=run_id, node_id=node_id, node_config=node_config, state=RecordDict(), run_config=run_config)


def now_answers(reply: Message, message_id: str) -> None:
    """Let a reply answer the first of several messages with one request."""
    reply.metadata.__dict__["_reply_to_message_id"] = message_id
