"""`fedplat sweep` of a private job: what choosing costs is said, and nothing is said where nothing is private."""

from tests.cli.conftest import FAST

GRID = ["--grid", "local.lr=0.1,0.5", "--out", "s", "--set", "job.rounds=1"]
PRIVATE = ["--set", "privacy.unit=client", "--set", "privacy.noise_multiplier=5.0"]


def test_a_sweep_of_private_runs_says_that_choosing_costs_more(fedplat):
    result = fedplat("sweep", *FAST, *GRID, *PRIVATE)
    assert result.code == 0, result.err
    said = " ".join((result.out + result.err).split())
    assert "each run's ε is for that run alone: choosing among 2 costs more" in said


def test_a_sweep_without_privacy_does_not(fedplat):
    result = fedplat("sweep", *FAST, *GRID)
    assert result.code == 0 and "ε" not in result.out + result.err
