"""Flower records on disk: decode(encode(x)) == x, also after the JSON and the safetensors went through a file."""

import json

import numpy as np
import pytest
import safetensors.numpy
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedplat.records import decode_records, encode_records
from fedplat.wire import Identity, decode_arrays, encode_arrays, payload_bytes, reply_content

LAWS = settings(max_examples=60, deadline=None)
names = st.text(max_size=6)
integers = st.integers(-(2**63), 2**63 - 1)
floats = st.floats(allow_nan=False)
shapes = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3)
dtypes = st.sampled_from([np.float32, np.float64, np.int64, np.uint8, np.bool_, np.float16])
arrays = st.dictionaries(names, st.tuples(dtypes, shapes).flatmap(lambda p: hnp.arrays(*p)), max_size=3)


def lists(values: st.SearchStrategy) -> st.SearchStrategy[list]:
    return st.lists(values, max_size=3)


metrics = st.dictionaries(names, integers | floats | lists(integers) | lists(floats), max_size=3)
scalars = [st.booleans(), integers, floats, st.text(max_size=6), st.binary(max_size=6)]
configs = st.dictionaries(names, st.one_of(*scalars, *[lists(s) for s in scalars]), max_size=4)
records = st.dictionaries(
    names, arrays.map(encode_arrays) | metrics.map(MetricRecord) | configs.map(ConfigRecord), max_size=4
).map(RecordDict)


def through_files(layout: dict, tables: dict[str, np.ndarray]) -> RecordDict:
    packed = safetensors.numpy.save(tables)
    return decode_records(json.loads(json.dumps(layout)), safetensors.numpy.load(packed))


@LAWS
@given(records)
def test_records_survive_encoding(content: RecordDict) -> None:
    assert decode_records(*encode_records(content)) == content


@LAWS
@given(records)
def test_records_survive_files(content: RecordDict) -> None:
    again = through_files(*encode_records(content))
    assert again == content
    for key, record in content.items():
        assert type(again[key]) is type(record)
        assert list(again[key]) == list(record)
        if not isinstance(record, ArrayRecord):
            assert [repr(v) for v in again[key].values()] == [
                repr(v) for v in record.values()
            ]  # 1, 1.0 and True differ


def test_a_metric_that_is_not_a_number_survives_files() -> None:
    content = RecordDict({"m": MetricRecord({"nan": float("nan"), "inf": float("inf")})})
    again = through_files(*encode_records(content))
    assert repr(dict(again["m"])) == repr(dict(content["m"]))


@LAWS
@given(arrays)
def test_arrays_survive_the_wire_bit_for_bit(given_arrays: dict[str, np.ndarray]) -> None:
    again = decode_arrays(encode_arrays(given_arrays))
    assert list(again) == list(given_arrays)
    for name, array in given_arrays.items():
        assert (again[name].dtype, again[name].shape) == (array.dtype, array.shape)
        assert again[name].tobytes() == array.tobytes()


@LAWS
@given(st.text(max_size=8), st.integers(0, 10**6), st.integers(0, 10), st.text(max_size=8))
def test_identity_survives_its_record(job: str, number: int, attempt: int, client: str) -> None:
    identity = Identity(job, number, attempt, client)
    assert Identity.of(RecordDict({"config": identity.record()}), "config") == identity


@pytest.mark.parametrize(
    "fields",
    [None, {}, {"job": "x"}, {"job": 1, "round": 1, "attempt": 0}, {"job": "x", "round": "1", "attempt": 0},
     {"job": "x", "round": 1.0, "attempt": 0}, {"job": "x", "round": 1, "attempt": 0, "client": 3}],
)  # fmt: skip
def test_incomplete_or_mistyped_identity_is_refused(fields: dict | None) -> None:
    content = RecordDict({} if fields is None else {"config": ConfigRecord(fields)})
    with pytest.raises(ValueError, match=r"identity|no 'config' record"):
        Identity.of(content, "config")


def test_reply_carries_identity_metrics_and_arrays() -> None:
    identity = Identity("digest", 3, 1, "client-7")
    given_arrays = encode_arrays({"w": np.ones((2, 3), np.float32)})
    reply = reply_content(identity, 12, {"loss": 0.5}, given_arrays)
    assert Identity.of(reply, "identity") == identity
    assert dict(reply.metric_records["metrics"]) == {"num-examples": 12, "loss": 0.5}
    assert payload_bytes(reply) == len(given_arrays["w"].data) >= 24


def test_arrays_in_any_memory_order_survive_files() -> None:
    """safetensors writes what lies in memory: a transposed array would come back scrambled."""
    whole = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    views = {"fortran": np.asfortranarray(whole), "transposed": whole.T, "strided": whole[:, ::2, ::-1]}
    for name, view in views.items():
        for record in (encode_arrays({name: view}), ArrayRecord({name: Array(view)})):  # ours, and somebody else's
            again = through_files(*encode_records(RecordDict({"state": record})))
            assert np.array_equal(decode_arrays(again["state"])[name], view)
