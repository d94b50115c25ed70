"""The workloads in plain PyTorch: their models, their examples as tensors, and the loop one would write by hand.

Needs only torch and numpy, because pfl runs it in an environment of its own.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.workloads import LR, SEED, Workload, array_files, data_directory

LOSS_ROWS = 2000


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def _two_nn() -> nn.Module:
    """The 2NN of McMahan et al. 2017, as in `fedplat.tasks.mnist`."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 10)
    )


def _small_cnn() -> nn.Module:
    """The CNN of `fedplat.tasks.mnist`."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, stride=2, padding=2), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(288, 50), nn.ReLU(), nn.Linear(50, 10),
    )  # fmt: skip


MODELS: dict[str, Callable[[], nn.Module]] = {"mlp": _mlp, "2nn": _two_nn, "cnn": _small_cnn}


def fresh_model(workload: Workload) -> nn.Module:
    """The initial model: the same weights for every contender."""
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        return MODELS[workload.model]()


def read_arrays(workload: Workload, directory: Path) -> tuple[Tensor, Tensor]:
    """Inputs and targets of all clients, mapped from the files (copy on write, which nobody does)."""
    inputs, targets = (np.load(file, mmap_mode="c") for file in array_files(workload, directory))
    return torch.from_numpy(inputs), torch.from_numpy(targets)


class ClientData:
    """The examples of each client."""

    def __init__(self, workload: Workload) -> None:
        self._size = workload.examples_per_client
        self._inputs, self._targets = read_arrays(workload, data_directory())

    def __getitem__(self, client: int) -> tuple[Tensor, Tensor]:
        rows = slice(client * self._size, (client + 1) * self._size)
        return self._inputs[rows], self._targets[rows]


def train_plainly(model: nn.Module, inputs: Tensor, targets: Tensor, batch_size: int) -> None:
    """One epoch over shuffled batches."""
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), LR)
    for rows in torch.randperm(len(targets)).split(batch_size):
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs[rows]), targets[rows]).backward()
        optimizer.step()


@torch.no_grad()
def final_loss(workload: Workload, model: nn.Module) -> float:
    """Loss of a model on the first rows: the evidence that a contender did the work."""
    inputs, targets = read_arrays(workload, data_directory())
    outputs = model.eval()(inputs[:LOSS_ROWS])
    return float(functional.cross_entropy(outputs, targets[:LOSS_ROWS]))


def print_outcome(round_ends: Sequence[float], loss: float) -> None:
    """What a peer says to the harness: one JSON line, the last on its standard output."""
    print(json.dumps({"round_ends": list(round_ends), "loss": loss}), flush=True)
