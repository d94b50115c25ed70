"""The keystream: unpredictable, never shared between processes, exact in its decisions.

Statistical tests fail by chance with a probability of at most 1e-7 per assertion.
"""

import copy
import os
import pickle
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from privacy.randomness import Keystream, insecure_stream, secure_stream

FALSE_ALARM = 1e-7


def in_child(work: Callable[[], bytes]) -> bytes:
    """What `work` returns in a forked child."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writer, work())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        received = file.read()
    os.waitpid(child, 0)
    return received


def test_two_secure_streams_differ():
    assert secure_stream().random_bytes(32) != secure_stream().random_bytes(32)


def test_insecure_streams_repeat_by_label_and_say_that_they_are_insecure():
    first, again, other = insecure_stream("noise", 1), insecure_stream("noise", 1), insecure_stream("noise", "1")
    assert first.random_bytes(1000) == again.random_bytes(1000)
    assert first.random_bytes(32) != other.random_bytes(32)
    assert first.insecure and not secure_stream().insecure


def test_the_secure_stream_has_no_seed_and_no_disguise():
    with pytest.raises(TypeError):
        Keystream(b"seed")
    with pytest.raises(AttributeError):
        insecure_stream("noise").insecure = False


@pytest.mark.parametrize("duplicate", [pickle.dumps, copy.copy, copy.deepcopy])
def test_streams_are_never_duplicated(duplicate):
    with pytest.raises(TypeError, match="pickled or copied"):
        duplicate(secure_stream())


def test_a_forked_child_never_continues_the_stream_of_its_parent():
    stream = secure_stream()
    stream.random_bytes(100)
    children = [in_child(lambda: stream.random_bytes(64)) for _ in range(2)]
    grandchild = in_child(lambda: in_child(lambda: stream.random_bytes(64)))
    after_use = in_child(lambda: stream.random_bytes(64) + in_child(lambda: stream.random_bytes(64)))
    draws = [*children, grandchild, after_use[:64], after_use[64:], stream.random_bytes(64)]
    assert all(len(draw) == 64 for draw in draws)
    assert len(set(draws)) == len(draws)


def test_an_insecure_stream_refuses_to_cross_a_fork():
    stream = insecure_stream("noise")

    def work() -> bytes:
        try:
            return stream.random_bytes(8)
        except RuntimeError as error:
            return str(error).encode()

    assert b"before a fork" in in_child(work)


@given(st.lists(st.integers(0, 300_000), max_size=4))
@settings(deadline=None, max_examples=20)
def test_how_it_is_cut_into_pieces_does_not_show(sizes):
    whole, pieces = insecure_stream("pieces"), insecure_stream("pieces")
    assert whole.random_bytes(sum(sizes)) == b"".join(pieces.random_bytes(size) for size in sizes)


def test_every_bit_is_fair():
    words = secure_stream().words(200_000)
    ones = [int(((words >> np.uint64(bit)) & np.uint64(1)).sum()) for bit in range(64)]
    assert min(stats.binomtest(count, words.size).pvalue for count in ones) > FALSE_ALARM / 64


def test_only_contiguous_arrays_are_filled():
    with pytest.raises(ValueError, match="contiguous"):
        secure_stream().fill(np.zeros((4, 4))[:, 1])


@pytest.mark.parametrize(("n", "q"), [(60_000, 0.004), (200_000, 0.5), (70_000, 0.999), (1000, 1 / 3)])
def test_poisson_sample_has_the_binomial_size(n, q):
    rows = secure_stream().uniform_rows(n, q)
    assert rows.dtype == np.int64 and (np.diff(rows) > 0).all() and rows[0] >= 0 and rows[-1] < n
    assert stats.binomtest(rows.size, n, q).pvalue > FALSE_ALARM


def test_each_row_is_sampled_alike_and_independently_of_the_next():
    stream, n, draws, q = secure_stream(), 50, 20_000, 0.3
    chosen = np.zeros((draws, n), bool)
    for draw in chosen:
        draw[stream.uniform_rows(n, q)] = True
    per_row = [stats.binomtest(int(count), draws, q).pvalue for count in chosen.sum(0)]
    pairs = [stats.binomtest(int((chosen[:, i] & chosen[:, i - 1]).sum()), draws, q * q).pvalue for i in range(n)]
    assert min(per_row) > FALSE_ALARM / n and min(pairs) > FALSE_ALARM / n


def test_sample_rates_are_never_rounded_up():
    stream = secure_stream()
    assert stream.uniform_rows(100_000, 0.0).size == 0
    assert stream.uniform_rows(100_000, 2.0**-65).size == 0  # below the resolution: down, not up
    assert stream.uniform_rows(70_000, 1.0).tolist() == list(range(70_000))
    assert stream.uniform_rows(0, 0.5).size == 0


@pytest.mark.parametrize("bad", [-0.1, 1.1, float("nan")])
def test_what_is_no_probability_is_refused(bad):
    with pytest.raises(ValueError, match="lies in"):
        secure_stream().uniform_rows(10, bad)
    with pytest.raises(ValueError, match="lies in"):
        secure_stream().bernoulli(bad)


@pytest.mark.parametrize("k", [2, 3, 5, 7, 100, 257])
def test_integers_below_k_are_uniform(k):
    stream = secure_stream()
    counts = np.bincount([stream.below(k) for _ in range(20_000)], minlength=k)
    assert counts.size == k
    assert stats.chisquare(counts).pvalue > FALSE_ALARM


@given(st.integers(1, 2**200))
@settings(deadline=None)
def test_integers_stay_below_k(k):
    assert 0 <= insecure_stream("below", k % 1000).below(k) < k


def test_below_needs_something_to_be_below():
    assert secure_stream().below(1) == 0
    with pytest.raises(ValueError, match="k ≥ 1"):
        secure_stream().below(0)


@pytest.mark.parametrize("p", [Fraction(1, 3), 0.1, 2.0**-3])
def test_bernoulli_has_its_probability(p):
    stream = secure_stream()
    heads = sum(stream.bernoulli(p) for _ in range(20_000))
    assert stats.binomtest(heads, 20_000, float(p)).pvalue > FALSE_ALARM
    assert not stream.bernoulli(0.0) and stream.bernoulli(1.0)


def test_exponentials_follow_their_law_into_the_tail():
    e = secure_stream().exponentials(1_000_000)
    assert np.isfinite(e).all() and (e >= 0).all()
    assert stats.kstest(e, "expon").pvalue > FALSE_ALARM
    for threshold in (2.0, 5.0, 8.0, 11.0):
        assert stats.binomtest(int((e > threshold).sum()), e.size, np.exp(-threshold)).pvalue > FALSE_ALARM
