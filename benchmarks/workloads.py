"""The work that every simulator in `benchmarks.simulation` is given: the same model, arrays, steps and batch.

The examples are drawn from a fixed seed, each a random centre of its class plus noise, so that a contender that trains
less than it should is seen in its loss. They are written once as .npy files and mapped by every process: what is
measured is training, not the making of random numbers. Client i holds the i-th block of rows; rows are IID, so blocks
are too. The harness imports this file, so it is free of torch: a library that the harness has loaded as well would
count only half in a contender's memory.
"""

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

LR = 0.05
SEED = 20261118
DATA_VARIABLE = "FEDPLAT_DATA"


@dataclass(frozen=True)
class Workload:
    key: str
    title: str
    model: Literal["mlp", "2nn", "cnn"]
    input_shape: tuple[int, ...]
    clients: int
    examples_per_client: int
    cohort: int
    batch_size: int
    signal: float
    """Norm of a class's centre beside noise of deviation 1: such that five rounds lower the loss visibly, not to 0."""

    @property
    def steps(self) -> int:
        return -(-self.examples_per_client // self.batch_size)

    @property
    def num_examples(self) -> int:
        return self.clients * self.examples_per_client

    def describe(self) -> str:
        return (
            f"{self.title}, {self.clients:,} clients × {self.examples_per_client}, {self.cohort:,} per round, batch "
            f"{self.batch_size}, one epoch ({self.steps} steps of SGD), lr {LR}"
        )


WORKLOADS = {
    w.key: w
    for w in (
        Workload("a", "MLP 64-128-10", "mlp", (64,), 200, 80, 200, 16, 8),
        Workload("b", "2NN 784-200-200-10", "2nn", (1, 28, 28), 100, 600, 10, 10, 4),
        Workload("c", "CNN on 28×28", "cnn", (1, 28, 28), 100, 600, 10, 10, 12),
        Workload("d", "MLP 64-128-10, tiny clients", "mlp", (64,), 1000, 9, 1000, 9, 8),
    )
}


def write_arrays(workload: Workload, directory: Path) -> None:
    rng = np.random.default_rng(SEED)
    width = int(np.prod(workload.input_shape))
    targets = rng.integers(10, size=workload.num_examples)
    centres = rng.standard_normal((10, width), dtype=np.float32) * np.float32(workload.signal / width**0.5)
    inputs = centres[targets]
    inputs += rng.standard_normal(inputs.shape, dtype=np.float32)
    inputs_file, targets_file = array_files(workload, directory)
    np.save(inputs_file, inputs.reshape(-1, *workload.input_shape))
    np.save(targets_file, targets.astype(np.int64))


def array_files(workload: Workload, directory: Path) -> tuple[Path, Path]:
    return directory / f"{workload.key}-inputs.npy", directory / f"{workload.key}-targets.npy"


def data_directory() -> Path:
    """Where the harness wrote the arrays; the variable tells every process that it starts."""
    return Path(os.environ[DATA_VARIABLE])


def now() -> float:
    """Seconds since the epoch: comparable between the harness and every process it starts."""
    return time.time()
