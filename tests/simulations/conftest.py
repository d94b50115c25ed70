"""A sweep over a tiny job."""

from collections.abc import Callable

import pytest

from simulations.sweep_plan import SweepSpec, given_keys

GRID = ("local.lr=0.1,0.4", "server.strategy=FedAvg,FedAdam")


@pytest.fixture
def spec(tiny_job) -> Callable[..., SweepSpec]:
    def make(grid=GRID, seeds=2, **settings) -> SweepSpec:
        return SweepSpec(given_keys(tiny_job(**settings)), tuple(grid), seeds)

    return make
