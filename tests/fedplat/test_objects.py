"""A message goes over in objects and comes out the same; what an array's bytes hold is read in place."""

import io
import time

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.proto.message_pb2 import PullObjectResponse
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.inflatable.inflatable_utils import ObjectUnavailableError

from fedplat.flower import become_server
from fedplat.flower.objects import is_not_there_yet, pull_message, push_objects
from fedplat.polling import Patience
from fedplat.wire import encode_arrays, view_array, view_arrays


@pytest.fixture
def message() -> Message:
    become_server(1)
    large = np.arange(4_000_000, dtype=np.float32)  # more than one chunk, the last one short
    arrays = {
        "large": large,
        "equal chunks": np.zeros(4_000_000, np.float32),
        "none": np.zeros((0, 3)),
        "one": large[:1],
    }
    content = RecordDict({"arrays": encode_arrays(arrays), "config": ConfigRecord({"x": 1})})
    return Message(content, dst_node_id=7, message_type="train")


def test_a_message_comes_out_as_it_went_in_also_if_its_objects_come_late(message: Message) -> None:
    store: dict[str, bytes] = {}
    objects = get_all_nested_objects(message)
    push_objects(objects, set(objects), store.__setitem__)
    late = set(store)

    def pull(object_id: str) -> bytes:
        if object_id in late:
            late.remove(object_id)
            raise ObjectUnavailableError(object_id)
        return store[object_id]

    started = time.monotonic()
    again = pull_message(get_object_tree(message), pull, 1 << 30)
    assert time.monotonic() - started < 0.9, "Flower waits a second for each"
    assert again.content == message.content and not late
    assert again.metadata.dst_node_id == 7 and again.metadata.message_id == message.object_id


def test_only_wanted_objects_are_pushed(message: Message) -> None:
    store: dict[str, bytes] = {}
    push_objects(get_all_nested_objects(message), {message.object_id}, store.__setitem__)
    assert list(store) == [message.object_id]


def test_an_object_that_is_announced_is_told_from_one_that_is_there_or_unknown() -> None:
    assert is_not_there_yet(PullObjectResponse(object_found=True).SerializeToString())
    there = PullObjectResponse(object_found=True, object_available=True, object_content=b"x")
    for answer in (there.SerializeToString(), PullObjectResponse().SerializeToString(), b"garbage"):
        assert not is_not_there_yet(answer)


@pytest.mark.parametrize("array", [np.ones((2, 3)), np.array(1.5), np.zeros((0, 2), np.int64), np.ones((3, 2)).T])
def test_arrays_are_read_in_place_and_can_not_be_written(array: np.ndarray) -> None:
    (seen,) = view_arrays(encode_arrays({"a": array})).values()
    assert np.array_equal(seen, array) and seen.dtype == array.dtype and seen.shape == array.shape
    assert not seen.flags.writeable


def test_bytes_that_are_no_plain_array_are_refused() -> None:
    zipped, pickled = io.BytesIO(), io.BytesIO()
    np.savez(zipped, a=np.ones(2))
    np.save(pickled, np.array([{}], object), allow_pickle=True)
    good = ArrayRecord({"a": Array(np.ones(3))})["a"].data
    for data in (zipped.getvalue(), pickled.getvalue(), b"", b"\x93NUMPY\x03\x00", good[:-1], good[:20]):
        with pytest.raises(ValueError):
            view_array(Array(dtype="float64", shape=(3,), stype="numpy.ndarray", data=data))
    with pytest.raises(ValueError, match="serialisation"):
        view_array(Array(dtype="float64", shape=(3,), stype="pickle", data=good))


def test_pauses_grow_with_the_wait_between_their_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("fedplat.polling.time.monotonic", lambda: now[0])
    patience = Patience(0.05, 1.0)
    pauses = []
    for waited in (0.0, 0.4, 2.0, 60.0):
        now[0] = 100.0 + waited
        pauses.append(patience.pause_s())
    assert pauses == pytest.approx([0.05, 0.05, 0.2, 1.0])
    patience.restart()
    assert patience.pause_s() == 0.05
