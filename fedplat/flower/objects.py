"""A message on its way, a few of its objects at a time.

Flower's own helpers hold a whole message two or three times while they push, pull or assemble it: its objects, their
serialised copies, the joined arrays. With models of gigabytes that decides how large a machine must be.
"""

import json
import threading
from collections.abc import Callable, Collection, Mapping
from io import BytesIO

from flwr.app import Array, Message
from flwr.app.message.arraychunk import ArrayChunk
from flwr.proto.message_pb2 import ObjectTree, PullObjectResponse
from flwr.supercore.inflatable.inflatable_object import (
    InflatableObject,
    get_object_body,
    get_object_children_ids_from_object_content,
    get_object_type_from_object_content,
    iterate_object_tree,
)
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.inflatable.inflatable_utils import pull_objects as pull_contents

from fedplat.errors import FedplatError

PullObject = Callable[[str], bytes]
PushObject = Callable[[str, bytes], None]
AT_ONCE = 2
"""Objects in memory beside the message itself."""
FIRST_POLL_S, LONGEST_POLL_S, MOST_S = 0.01, 0.5, 120.0
_CHUNK_DEPTH = 4
"""Message, records, record, array, chunk."""
_ANNOUNCED: bytes = PullObjectResponse(object_found=True).SerializeToString()


def is_not_there_yet(answer: bytes) -> bool:
    """Whether an answer to `pull-object` says to ask again: the object is announced and on its way."""
    return answer == _ANNOUNCED


def push_objects(objects: Mapping[str, InflatableObject], wanted: Collection[str], push: PushObject) -> None:
    """Push those objects that the other side wants, each serialised when it is its turn."""
    for object_id, part in objects.items():
        if object_id in wanted:
            push(object_id, part.deflate())


class TooLarge(FedplatError):
    """A message is larger than what it could be about."""


class _Room:
    """Bytes that a message may still have. A chunk that is listed often counts as often: that is what it becomes."""

    def __init__(self, most_bytes: int) -> None:
        self._left, self._lock, self._most = most_bytes, threading.Lock(), most_bytes

    def take(self, content: bytes) -> bytes:
        with self._lock:
            self._left -= len(content)
        if self._left < 0:
            raise TooLarge(f"the message has more than the {self._most} bytes that it could have: not fetched")
        return content


def pull_message(tree: ObjectTree, pull: PullObject, most_bytes: int) -> Message:
    """The message of an object tree; its arrays grow in place as their chunks arrive."""
    room = _Room(most_bytes)
    chunks = _at_depth(tree, _CHUNK_DEPTH)
    ids = dict.fromkeys(part.object_id for part in iterate_object_tree(tree))
    parts = [object_id for object_id in ids if object_id not in chunks]
    contents = _pull(parts, lambda object_id: room.take(pull(object_id)))
    arrays: dict[str, InflatableObject] = {
        object_id: _pull_array(content, pull, room)
        for object_id, content in contents.items()
        if get_object_type_from_object_content(content) == Array.__qualname__
    }
    message = inflate_object_from_contents(tree.object_id, contents, objects=arrays)
    if not isinstance(message, Message):
        raise ValueError(f"not a message but a {type(message).__name__}")
    message.metadata.__dict__["_message_id"] = tree.object_id
    return message


def _pull(ids: list[str], pull: PullObject) -> dict[str, bytes]:
    """Contents by id. A message is announced a moment before its objects are there: they are looked for soon again."""
    return pull_contents(
        ids, pull, initial_backoff=FIRST_POLL_S, backoff_cap=LONGEST_POLL_S, max_time=MOST_S, max_tries_per_object=None
    )


def _at_depth(tree: ObjectTree, depth: int) -> set[str]:
    level = [tree]
    for _ in range(depth):
        level = [child for part in level for child in part.children]
    return {part.object_id for part in level}


def _pull_array(content: bytes, pull: PullObject, room: _Room) -> Array:
    children = get_object_children_ids_from_object_content(content)
    about = json.loads(get_object_body(content, Array))
    data = BytesIO()  # grows in place, and `getvalue` hands its memory over uncopied
    order = [children[i] for i in about["arraychunk_ids"]]
    for start in range(0, len(order), AT_ONCE):
        batch = order[start : start + AT_ONCE]
        chunks = _pull(list(dict.fromkeys(batch)), pull)
        for object_id in batch:
            data.write(room.take(get_object_body(chunks[object_id], ArrayChunk)))
    return Array(dtype=about["dtype"], shape=tuple(about["shape"]), stype=about["stype"], data=data.getvalue())
