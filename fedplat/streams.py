"""One random stream per purpose, so that an experiment repeats whatever the order of execution.

A stream is named by labels, for example (seed, "client", "client-7", round). Its seed is a hash of
those labels: two different names give independent streams, and no stream depends on how many
numbers another one drew. That is what makes serial, parallel and resumed runs equal bit for bit.

These streams only shape experiments. Randomness that guards privacy never comes from here.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from fedplat import canonical

if TYPE_CHECKING:
    import torch

Label = str | int


def stream_seed(*labels: Label) -> int:
    """A 63-bit seed that depends on every label and on nothing else."""
    return int(canonical.digest(list(labels))[:16], 16) >> 1


def numpy_stream(*labels: Label) -> np.random.Generator:
    return np.random.default_rng(stream_seed(*labels))


def torch_stream(*labels: Label) -> "torch.Generator":
    import torch

    return torch.Generator().manual_seed(stream_seed(*labels))


@contextmanager
def torch_seeded(*labels: Label) -> Iterator[None]:
    """Run a block under a named stream for torch's global generator (dropout, initialisation)."""
    import torch

    with torch.random.fork_rng():
        torch.manual_seed(stream_seed(*labels))
        yield


@contextmanager
def globals_seeded(*labels: Label) -> Iterator[None]:
    """Run a block under a named stream for the global generators of Python, NumPy and torch.

    Flower's strategies draw from `random`; seeding it from (seed, round) leaves no state to checkpoint.
    """
    seed = stream_seed(*labels)
    python_state, numpy_state = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    try:
        with torch_seeded(*labels):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
