"""Packed records: unpack(pack(x)) == x bit for bit, and bytes that nobody packed are refused in words."""

import json
import struct

import numpy as np
import pytest
import safetensors.numpy
from flwr.app import ConfigRecord, MetricRecord, RecordDict
from hypothesis import given
from hypothesis import strategies as st

from fedplat import packing
from fedplat.packing import PACKED, is_packed, pack, unpack
from fedplat.wire import encode_arrays
from tests.fedplat.test_records import LAWS, records


def same(one: RecordDict, other: RecordDict) -> bool:
    assert [type(record) for record in one.values()] == [type(record) for record in other.values()]
    assert [list(record) for record in one.values()] == [list(record) for record in other.values()]
    return list(one) == list(other) and one == other


@LAWS
@given(records, st.sampled_from([0, 150, 300, 1 << 20]))
def test_content_survives_packing_whatever_fits_inside(content: RecordDict, room: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "ROOM", room)
        packed = pack(content)
        assert is_packed(packed) and same(unpack(packed), content)


def test_a_small_model_is_one_record_and_a_large_array_stays_beside_it() -> None:
    arrays = {"a": np.ones(5, np.float32), "large": np.zeros(packing.ROOM, np.uint8), "b": np.array(2.0)}
    content = RecordDict({"arrays": encode_arrays(arrays), "metrics": MetricRecord({"loss": 0.1 + 0.2})})
    packed = pack(content)
    assert set(packed) == {PACKED, "arrays"} and set(packed["arrays"]) == {"large"}
    assert packed["arrays"]["large"].data is content["arrays"]["large"].data, "a large array must not be copied"
    assert same(unpack(packed), content)
    del content["arrays"]["large"]
    assert set(pack(content)) == {PACKED}


def test_what_is_not_packed_stays_as_it_is() -> None:
    content = RecordDict({"config": ConfigRecord({"x": 1})})
    assert unpack(content) is content
    with pytest.raises(ValueError, match="can't be called"):
        pack(RecordDict({PACKED: ConfigRecord()}))


def forged(header: object, tables: bytes | None = None) -> ConfigRecord:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    body = safetensors.numpy.save({}) if tables is None else tables
    return ConfigRecord({"bytes": struct.pack("<Q", len(text)) + text + body})


ARRAYS = {"kind": "arrays", "names": ["w"]}
TABLE = safetensors.numpy.save({"0/0": np.ones(2)})
HOSTILE = {
    "another kind of record": MetricRecord({"bytes": 1}),
    "no bytes": ConfigRecord({"bytes": "text"}),
    "more than bytes": ConfigRecord({"bytes": b"", "more": 1}),
    "empty": ConfigRecord({"bytes": b""}),
    "endless header": ConfigRecord({"bytes": struct.pack("<Q", 2**63) + b"{}"}),
    "no JSON": forged(b"\xff\xfe"),
    "deep JSON": forged(b"[" * 100_000),
    "no table": forged([]),
    "no layout": forged({"names": {}}),
    "layout of text": forged({"layout": "x", "names": {}}),
    "kind missing": forged({"layout": {"a": {}}, "names": {}}),
    "names without arrays": forged({"layout": {}, "names": {"a": ["w"]}}),
    "names of metrics": forged({"layout": {"a": {"kind": "metrics", "values": {}}}, "names": {"a": []}}),
    "arrays missing": forged({"layout": {"a": ARRAYS}, "names": {"a": ["w"]}}),
    "arrays unnamed": forged({"layout": {"a": ARRAYS}, "names": {"a": []}}, TABLE),
    "array named twice": forged({"layout": {"a": ARRAYS}, "names": {"a": ["w", "w"]}}, TABLE),
    "wrong type of metric": forged({"layout": {"a": {"kind": "metrics", "values": {"x": "y"}}}, "names": {}}),
    "wrong type of config": forged({"layout": {"a": {"kind": "config", "values": {"x": {"y": 1}}}}, "names": {}}),
    "no safetensors": forged({"layout": {}, "names": {}}, b"\x80\x04pickle"),
    "arrays cut off": forged({"layout": {"a": ARRAYS}, "names": {"a": ["w"]}}, TABLE[:-1]),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_bytes_that_nobody_packed_are_refused(case: str) -> None:
    with pytest.raises(ValueError, match="can't be read"):
        unpack(RecordDict({PACKED: HOSTILE[case]}))


def test_records_beside_that_nobody_announced_are_refused() -> None:
    small = {"w": np.ones(2)}
    for extra in (encode_arrays({"x": np.ones(1)}), encode_arrays(small), ConfigRecord({"x": 1}), MetricRecord()):
        for key in ("arrays", "more"):
            content = pack(RecordDict({"arrays": encode_arrays(small)}))
            content[key] = extra
            with pytest.raises(ValueError, match="can't be read"):
                unpack(content)


@LAWS
@given(records, st.data())
def test_one_wrong_byte_is_refused_or_gives_ordinary_records(content: RecordDict, data: st.DataObject) -> None:
    packed = pack(content)
    raw = bytearray(packed[PACKED]["bytes"])
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    packed[PACKED]["bytes"] = bytes(raw)
    try:
        found = unpack(packed)
    except ValueError:
        return
    assert isinstance(found, RecordDict)
