"""Random streams: named by their labels, independent of each other and of the global generators."""

import random
from collections.abc import Callable
from contextlib import AbstractContextManager

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedplat.streams import globals_seeded, numpy_stream, stream_seed, torch_seeded, torch_stream

LAWS = settings(max_examples=60, deadline=None)
labels = st.lists(st.integers(-(2**70), 2**70) | st.text(max_size=8), max_size=4)
Block = Callable[..., AbstractContextManager[None]]


def global_states() -> tuple[object, bytes, tuple[object, ...]]:
    name, keys, position, has_gauss, cached = np.random.get_state()
    return (
        random.getstate(),
        torch.get_rng_state().numpy().tobytes(),
        (name, keys.tobytes(), position, has_gauss, cached),
    )


@LAWS
@given(labels, labels)
def test_equal_labels_give_equal_seeds_and_different_labels_different_ones(one: list, other: list) -> None:
    assert (stream_seed(*one) == stream_seed(*other)) == (one == other)


@LAWS
@given(labels)
def test_seed_has_63_bits(names: list) -> None:
    assert 0 <= stream_seed(*names) < 2**63


@pytest.mark.parametrize(
    ("one", "other"), [((1,), ("1",)), (("ab", "c"), ("a", "bc")), ((1, 2), (12,)), ((), ("",)), ((1, 2), (2, 1))]
)
def test_labels_are_never_run_together(one: tuple, other: tuple) -> None:
    assert stream_seed(*one) != stream_seed(*other)


def test_seeds_stay_the_same_across_versions() -> None:
    """A published run repeats only while this number doesn't change: SHA-256 of [0,"client","client-7",3]."""
    assert stream_seed(0, "client", "client-7", 3) == 6297471623618847320


@LAWS
@given(labels)
def test_a_stream_repeats_whatever_else_was_drawn(names: list) -> None:
    first_numpy, first_torch = numpy_stream(*names).random(5), torch.rand(5, generator=torch_stream(*names))
    random.random(), np.random.random(), torch.rand(3)
    numpy_stream("another").random(100)
    assert np.array_equal(numpy_stream(*names).random(5), first_numpy)
    assert torch.equal(torch.rand(5, generator=torch_stream(*names)), first_torch)


@pytest.mark.parametrize("block", [torch_seeded, globals_seeded])
def test_seeded_block_restores_all_global_generators(block: Block) -> None:
    before = global_states()
    with block(0, "x"):
        random.random(), np.random.normal(), torch.rand(3)
        inside = global_states()
    if block is globals_seeded:
        assert global_states() == before
    else:
        assert global_states()[1] == before[1]
    assert inside != before


@pytest.mark.parametrize("block", [torch_seeded, globals_seeded])
def test_seeded_block_restores_torch_after_an_error(block: Block) -> None:
    before = global_states()
    with pytest.raises(KeyError), block(0, "x"):
        torch.rand(3)
        raise KeyError
    assert global_states() == before


def test_blocks_of_one_name_draw_the_same_and_of_another_name_differ() -> None:
    def draw(*names: str | int) -> tuple[float, float, float]:
        with globals_seeded(*names):
            return random.random(), float(np.random.random()), float(torch.rand(1))

    first = draw(0, "round", 1)
    random.random(), np.random.random(), torch.rand(1)
    assert draw(0, "round", 1) == first
    assert all(a != b for a, b in zip(draw(0, "round", 2), first, strict=True))


def test_nested_blocks_do_not_disturb_the_outer_one() -> None:
    with torch_seeded("outer"):
        plain = (torch.rand(1), torch.rand(1))
    with torch_seeded("outer"):
        first = torch.rand(1)
        with globals_seeded("inner"):
            torch.rand(7)
        assert (first, torch.rand(1)) == plain
