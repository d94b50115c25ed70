"""Flower's own simulation runtime gives the same bits, and its absence is explained."""

import importlib.util

import pytest

from fedplat.errors import UsageError
from simulations.ray_engine import require_ray


@pytest.mark.slow
def test_ray_equals_serial_bit_for_bit(tiny_job, simulated):
    pytest.importorskip("ray", reason="the ray extra is not installed")
    serial = simulated(tiny_job(job__rounds=2), "serial")
    on_ray = simulated(tiny_job(job__rounds=2, simulation__engine="ray", simulation__workers=2), "ray")
    assert on_ray.model_file.read_bytes() == serial.model_file.read_bytes()


def test_a_missing_extra_is_named(tiny_job, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install 'fedplat\[ray\]'"):
        require_ray(tiny_job(simulation__engine="ray"))


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"simulation__faults": {"fail": 0.1}}, "faults needs one of the engines"),
        ({"server__strategy": "Scaffold"}, "can't checkpoint what clients remember"),
    ],
)
def test_what_ray_cannot_do_is_refused_before_the_run(settings, reason, tiny_job):
    pytest.importorskip("ray", reason="the ray extra is not installed")
    with pytest.raises(UsageError, match=reason):
        require_ray(tiny_job(simulation__engine="ray", **settings))
