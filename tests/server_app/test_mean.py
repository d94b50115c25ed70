"""The fixed-point mean: exact, order-independent, bounded, and equal to Flower's within float tolerance."""

from fractions import Fraction

import numpy as np
import pytest
from flwr.app import Message, RecordDict
from flwr.serverapp.strategy import FedAvg
from hypothesis import given, settings
from hypothesis import strategies as st

from fedplat import flower, wire
from server_app import mean as mean_module
from server_app.mean import MAX_TOTAL_WEIGHT, SCALE_BITS, MeanReducer

coordinates = st.floats(-1000, 1000, width=32)
updates = st.integers(1, 6).flatmap(
    lambda size: st.lists(
        st.tuples(st.lists(coordinates, min_size=size, max_size=size), st.integers(1, 10_000)), min_size=1, max_size=12
    )
)


def reduce(pairs: list[tuple[np.ndarray, int]]) -> np.ndarray:
    reducer = MeanReducer({"w": pairs[0][0]})
    for array, weight in pairs:
        reducer.add({"w": array}, weight)
    return reducer.mean()["w"]


def as_arrays(drawn: list[tuple[list[float], int]]) -> list[tuple[np.ndarray, int]]:
    return [(np.array(values, np.float32), weight) for values, weight in drawn]


@given(updates, st.randoms(use_true_random=False))
@settings(deadline=None)
def test_any_order_gives_the_same_bits(drawn, shuffler):
    pairs = as_arrays(drawn)
    shuffled = list(pairs)
    shuffler.shuffle(shuffled)
    assert reduce(pairs).tobytes() == reduce(shuffled).tobytes()


@given(updates)
@settings(deadline=None)
def test_mean_is_the_exact_rational_mean_rounded(drawn):
    pairs = as_arrays(drawn)
    total = sum(weight for _, weight in pairs)
    found = reduce(pairs)
    for i in range(len(found)):
        exact = sum(Fraction(float(array[i])) * weight for array, weight in pairs) / total
        ulp = np.spacing(np.float32(abs(float(exact))))
        assert abs(Fraction(float(found[i])) - exact) <= Fraction(1, 2**SCALE_BITS) + Fraction(float(ulp))


def test_mean_of_one_update_is_that_update():
    weights = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    np.testing.assert_allclose(reduce([(weights, 7)]), weights, rtol=0, atol=2.0**-SCALE_BITS)


def test_chunking_does_not_show(monkeypatch):
    rng = np.random.default_rng(1)
    pairs = [(rng.normal(size=(7, 31)).astype(np.float32), int(w)) for w in rng.integers(1, 50, 5)]
    whole = reduce(pairs)
    monkeypatch.setattr(mean_module, "_CHUNK", 10)
    assert reduce(pairs).tobytes() == whole.tobytes()


def test_integer_arrays_are_averaged_and_rounded():
    template = {"steps": np.array(0, np.int64), "mask": np.array([True, False])}
    reducer = MeanReducer(template)
    reducer.add({"steps": np.array(10, np.int64), "mask": np.array([True, False])}, 1)
    reducer.add({"steps": np.array(20, np.int64), "mask": np.array([True, True])}, 3)
    result = reducer.mean()
    assert result["steps"] == 18 and result["steps"].dtype == np.int64 and result["steps"].shape == ()
    assert result["mask"].tolist() == [True, True]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 2.0**22, -1e30])
def test_what_does_not_fit_is_refused_and_the_sum_stays_as_it_was(bad):
    reducer = MeanReducer({"a": np.zeros(2, np.float32), "b": np.zeros(2, np.float32)})
    good = {"a": np.ones(2, np.float32), "b": np.ones(2, np.float32)}
    reducer.add(good, 1)
    with pytest.raises(ValueError, match="outside"):
        reducer.add({"a": np.ones(2, np.float32), "b": np.array([0, bad], np.float32)}, 1)
    assert reducer.count == 1 and reducer.mean()["a"].tolist() == [1, 1]


@pytest.mark.parametrize("weight", [0, -1, 1.5, MAX_TOTAL_WEIGHT + 1])
def test_weights_must_be_whole_positive_and_bounded(weight):
    with pytest.raises(ValueError, match="weight"):
        MeanReducer({"w": np.zeros(1, np.float32)}).add({"w": np.ones(1, np.float32)}, weight)


def test_extremes_of_range_and_weight_do_not_wrap():
    largest = np.nextafter(np.float32(2**22), np.float32(0))
    pairs = [(np.array([sign * largest], np.float32), MAX_TOTAL_WEIGHT // 4) for sign in (1, 1, -1, 1)]
    assert reduce(pairs)[0] == pytest.approx(float(largest) / 2)


def test_equals_flowers_fedavg_within_float_tolerance():
    flower.become_server(1)
    rng = np.random.default_rng(2)
    request = Message(RecordDict(), dst_node_id=5, message_type="train")
    flower.stamp(request)
    pairs = [(rng.normal(size=(40, 30)).astype(np.float32), int(w)) for w in rng.integers(1, 500, 30)]
    replies = [
        Message(
            wire.reply_content(wire.Identity("j", 1, 1), weight, {"loss": 0.5}, wire.encode_arrays({"w": array})),
            reply_to=request,
        )
        for array, weight in pairs
    ]
    arrays, _ = FedAvg().aggregate_train(1, replies)
    assert arrays is not None
    np.testing.assert_allclose(reduce(pairs), arrays["w"].numpy(), rtol=1e-5, atol=1e-6)
