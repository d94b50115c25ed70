"""Published ε values, each by the accountant and conversion that its source used, and ours beside the recorded ones."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from dp_accounting import rdp

from privacy import events
from privacy.accountants.prv import MAX_POINTS, _history, _opacus_epsilon, grid_points
from privacy.accounting import epsilon, epsilons, rdp_curve

REFERENCE = json.loads((Path(__file__).parent / "eps_reference.json").read_text(encoding="utf-8"))
CASES = {case["id"]: case for case in REFERENCE["cases"]}
ABSURD = "tfp-test2"
"""ε in the millions: PLD and PRV must decline, quickly."""
CLASSIC_ORDERS = [1 + x / 10 for x in range(1, 100)] + [float(x) for x in range(12, 64)]


def event_of(case):
    return events.dp_sgd(case["q"], case["sigma"], case["steps"])


def classic_epsilon(case) -> float:
    """The conversion of Mironov 2017, Proposition 3: RDP(α) + log(1/δ)/(α−1). Looser; older papers used it."""
    orders = np.array(CLASSIC_ORDERS)
    return float(np.min(rdp_curve(event_of(case), CLASSIC_ORDERS) - math.log(case["delta"]) / (orders - 1)))


def as_its_source_did(case) -> float:
    how = case["published_accountant"]
    if case["id"] == ABSURD:
        orders = [1.25, 1.5, 1.75, 2.0, 2.25, 2.5, 3.0, 3.5, 4.0, 4.5, *range(5, 64), 128, 256, 512]
        return float(rdp.compute_epsilon(orders, rdp_curve(event_of(case), orders), case["delta"])[0])
    if "classic" in how:
        return classic_epsilon(case)
    if how.startswith("RDP"):
        return epsilon(event_of(case), case["delta"], accountant="rdp")
    if how.startswith("PRV"):
        return _opacus_epsilon(_history(event_of(case), "add-remove"), case["delta"])
    return epsilon(event_of(case), case["delta"])  # PLD, and the exact Gaussian


def test_there_are_enough_cases():
    assert len(CASES) >= 15


@pytest.mark.parametrize("name", CASES)
def test_published_value_is_reproduced(name):
    case = CASES[name]
    assert as_its_source_did(case) == pytest.approx(case["published_eps"], abs=case["tol"])


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if name != ABSURD])
def test_accountants_agree_with_the_recorded_figures(name):
    case, found = CASES[name], epsilons(event_of(CASES[name]), CASES[name]["delta"])
    recorded = case["computed"]
    assert found.pld == pytest.approx(recorded["dpacc_pld"], abs=1e-4)
    assert found.rdp == pytest.approx(recorded["dpacc_rdp"], rel=1e-4)
    assert found.rdp == pytest.approx(recorded["opacus_rdp"], rel=0.02)
    assert found.pld <= found.rdp
    assert found.claimed == found.pld
    if found.prv is not None:
        assert found.prv == pytest.approx(recorded["opacus_prv"], abs=1e-4)
    if "dpacc_pld_replace_one" in recorded:
        replaced = epsilon(event_of(case), case["delta"], "replace-one")
        assert replaced == pytest.approx(recorded["dpacc_pld_replace_one"], abs=1e-3, rel=1e-4)


def test_absurd_noise_is_left_to_rdp():
    case = CASES[ABSURD]
    found = epsilons(event_of(case), case["delta"])
    assert (found.pld, found.prv, found.claimed_by) == (None, None, "rdp")
    assert found.claimed == pytest.approx(case["computed"]["dpacc_rdp"], rel=1e-6)
    assert len(found.notes) == 2


def test_prv_never_exceeds_its_grid():
    """σ = 0.3, q = 0.1, 10,000 steps grew to 24 GB in Opacus; σ = 1, q = 0.01, 10⁶ steps ran out of memory."""
    for event in (events.dp_sgd(0.1, 0.3, 10_000), events.dp_sgd(0.01, 1.0, 1_000_000)):
        assert grid_points(event, _history(event, "add-remove"), 1e-5, "add-remove") > MAX_POINTS
        assert epsilons(event, 1e-5).prv is None
