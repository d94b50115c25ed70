"""Small real things that many tests need: a job that trains in a fraction of a second, and ways to run it."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from fedplat.events import Event
from fedplat.job import Job, validate_job
from fedplat.rundir import RunDirectory

SHARED = Path(__file__).parents[2] / "shared"


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    torch.set_num_threads(1)
    yield


@pytest.fixture
def tiny_job() -> Callable[..., Job]:
    """A job on the digits with few clients; keyword arguments are `section__key=value`."""

    def make(**settings: object) -> Job:
        table: dict[str, dict[str, object]] = {
            "job": {"name": "tiny", "rounds": 3},
            "task": {"args": {"hidden": 8}},
            "cohort": {"clients": 6, "fraction": 0.7},
            "local": {"lr": 0.2, "batch_size": 32},
            "simulation": {"engine": "serial"},
        }
        for name, value in settings.items():
            section, _, key = name.partition("__")
            table.setdefault(section, {})[key] = value
        return validate_job(table, "tiny")

    return make


@pytest.fixture
def simulated(tmp_path: Path) -> Callable[..., RunDirectory]:
    """Run a job on virtual clients and return its directory."""
    from simulations.simulate import simulate

    def run(job: Job, name: str = "run", *listeners: Callable[[Event], None]) -> RunDirectory:
        directory = RunDirectory.create(tmp_path / name, job)
        simulate(job, directory, listeners)
        return directory

    return run
