"""Ten thousand virtual clients, a thousand per round, in bounded memory."""

import resource
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks import plain_training
from fedplat.summary import summarise
from fedplat.task import Examples, Split
from fedplat.tasks import mnist
from fedplat.tasks.classification import Classification


class Crowd(Classification):
    """Thirty thousand random examples for ten thousand clients."""

    def __init__(self, data_dir: Path) -> None:
        super().__init__(data_dir)

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def data(self, split: Split) -> Examples:
        rng = np.random.default_rng(split == "train")
        size = 30_000 if split == "train" else 500
        inputs = torch.from_numpy(rng.normal(size=(size, 64)).astype(np.float32))
        return Examples(inputs, torch.from_numpy(rng.integers(0, 10, size)))


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["vector", "process"])
def test_ten_thousand_clients_run_in_bounded_memory(engine, tiny_job, simulated):
    job = tiny_job(
        task__name=f"{__name__}:Crowd", task__args={}, data__partition={"kind": "iid"}, cohort__clients=10_000,
        cohort__size=1000, job__rounds=3, simulation__engine=engine,
    )  # fmt: skip
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    run = simulated(job)
    grown_mb = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert summarise(run).updates == 3000
    # A thousand updates of this model are 38 MB as arrays; holding a round of them in messages takes far more.
    assert grown_mb < 200


@pytest.mark.parametrize("name", ["_two_nn", "_small_cnn"])
def test_the_benchmark_trains_the_models_of_the_mnist_task(name):
    assert str(getattr(mnist, name)()) == str(getattr(plain_training, name)())
