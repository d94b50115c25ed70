"""Accountants at their limits: many releases, large losses, and somebody who is in several datasets."""

import numpy as np
import pytest
from dp_accounting import ComposedDpEvent, get_epsilon_gaussian

from privacy.accountants import pld
from privacy.accountants.pld import pld_epsilon
from privacy.accountants.prv import prv_epsilon
from privacy.accountants.rdp import NotTaken
from privacy.accountants.running import least_epsilon
from privacy.accounting import RunningEpsilon, added_up, composed_epsilon, epsilon, epsilons
from privacy.events import dp_sgd, gaussian


def test_many_releases_by_pld_are_what_few_would_add_up_to():
    """Beyond 100,000 releases the grid is composed in another way: the same figure on both sides of the border."""
    at = pld.MANY_RELEASES
    for rate, noise in ((1e-5, 1.0), (1e-3, 5.0), (1.0, 5000.0)):
        below, above = (pld_epsilon(dp_sgd(rate, noise, count), 1e-5) for count in (at, at + 1))
        assert below <= above <= below * 1.001 + 1e-6
        twice = pld_epsilon(ComposedDpEvent([dp_sgd(rate, noise, at), dp_sgd(rate, noise, at + 1)]), 1e-5)
        assert twice == pytest.approx(epsilon(dp_sgd(rate, noise, 2 * at + 1), 1e-5), rel=1e-3)


def test_where_transforms_round_too_much_for_delta_pld_gives_no_figure():
    with pytest.raises(NotTaken, match="round its Fourier transforms"):
        pld_epsilon(dp_sgd(1e-6, 1.0, 10_000_000), 1e-8)
    assert epsilons(dp_sgd(1e-6, 1.0, 10_000_000), 1e-8).claimed_by == "rdp"


def test_a_running_epsilon_beyond_all_measure_is_no_smaller_than_plds():
    """e^709 is the largest power that a float holds: beyond it the running figure once fell short."""
    event = dp_sgd(0.001, 1.0, 1)
    for count in (10**8, 4 * 10**8):
        running, rdp = (
            RunningEpsilon(event, 1e-5).after(count),
            epsilon(dp_sgd(0.001, 1.0, count), 1e-5, "add-remove", "rdp"),
        )
        assert rdp * 0.9 < running <= rdp
    mass = np.zeros(400_000)
    mass[-1] = 1.0  # one loss of 2,000, surely
    assert least_epsilon(0, 0.005, mass, 0.0, 1e-5) == pytest.approx(0.005 * 399_999 + np.log1p(-1e-5), abs=1e-6)


def test_somebody_in_several_datasets_loses_what_all_of_them_release():
    """Sequential composition: order and split of releases over datasets don't matter, and one more costs more."""
    first, second = dp_sgd(0.01, 1.1, 1000), gaussian(5.0, 3)
    both = composed_epsilon([first, second], 1e-5)
    assert both == pytest.approx(composed_epsilon([second, first], 1e-5), rel=1e-6)
    assert composed_epsilon([dp_sgd(0.01, 1.1, 400), dp_sgd(0.01, 1.1, 600)], 1e-5) == pytest.approx(
        epsilon(first, 1e-5), rel=1e-6
    )
    assert max(epsilon(first, 1e-5), epsilon(second, 1e-5)) < both
    assert composed_epsilon([], 1e-5) == 0 and composed_epsilon([first], 1e-5) == epsilon(first, 1e-5)


def test_adding_up_claims_is_never_less_than_composing_their_events():
    parts, delta = [dp_sgd(0.01, 1.1, 1000), gaussian(5.0, 3), dp_sgd(0.05, 2.0, 200)], 1e-6
    total, deltas = added_up([(epsilon(part, delta), delta) for part in parts])
    assert deltas == pytest.approx(3e-6) and composed_epsilon(parts, deltas) <= total
    assert added_up([]) == (0.0, 0.0)


def test_prv_gives_no_figure_where_it_would_be_cut_off():
    """Opacus returns 709.78, the logarithm of the largest float, for every ε beyond it: less than is true."""
    with pytest.raises(NotTaken, match="leaves a float's range"):
        prv_epsilon(gaussian(0.05, 3), 1e-5)
    assert epsilons(gaussian(0.05, 3), 1e-5).prv is None
    assert prv_epsilon(gaussian(0.1, 3), 1e-5) == pytest.approx(get_epsilon_gaussian(0.1 / 3**0.5, 1e-5), abs=0.02)
