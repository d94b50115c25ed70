"""Accountants at their limits: many releases, large losses, and somebody who is in several datasets."""

import numpy as np
import pytest
from dp_accounting import ComposedDpEvent

from privacy.accountants import pld
from privacy.accountants.pld import pld_epsilon
from privacy.accountants.rdp import NotTaken
from privacy.accountants.running import least_epsilon
from privacy.accounting import RunningEpsilon, epsilon, epsilons
from privacy.events import dp_sgd


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
