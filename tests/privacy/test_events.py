"""Events and their JSON: an exact round trip, a closed vocabulary, and constructors that mean what they say."""

import json
import math

import pytest
from dp_accounting import dp_event
from hypothesis import given, settings
from hypothesis import strategies as st

from fedplat import canonical
from privacy import events
from privacy.events import event_from_json, event_key, event_to_json

positive = st.floats(1e-6, 1e6)
counts = st.integers(1, 10**9)
rates = st.floats(1e-9, 1.0)
mixtures = st.lists(st.floats(0.01, 1.0), min_size=1, max_size=5).map(
    lambda weights: dp_event.MixtureOfGaussiansDpEvent(
        1.1, tuple(float(i) for i in range(len(weights))), tuple(w / math.fsum(weights) for w in weights)
    )
)
leaves = st.one_of(
    st.just(dp_event.NoOpDpEvent()),
    st.just(dp_event.NonPrivateDpEvent()),
    positive.map(dp_event.GaussianDpEvent),
    positive.map(dp_event.LaplaceDpEvent),
    st.builds(dp_event.ZCDpEvent, st.floats(0, 100), st.floats(0, 1)),
    st.builds(dp_event.TruncatedSubsampledGaussianDpEvent, counts, rates, counts, positive),
    mixtures,
)
any_event = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.builds(dp_event.PoissonSampledDpEvent, rates, inner),
        st.builds(
            lambda n, m, e: dp_event.SampledWithoutReplacementDpEvent(n + m, m, e), counts, st.integers(1, 9), inner
        ),
        st.builds(dp_event.SelfComposedDpEvent, inner, counts),
        st.lists(inner, min_size=1, max_size=4).map(dp_event.ComposedDpEvent),
        st.builds(
            dp_event.RepeatAndSelectDpEvent, inner, st.floats(1, 100), st.one_of(st.just(math.inf), st.floats(0, 9))
        ),
    ),
    max_leaves=8,
)


@given(any_event)
@settings(deadline=None)
def test_json_round_trip_is_exact(event):
    text = canonical.dumps(event_to_json(event))
    again = event_from_json(json.loads(text))
    assert again == event
    assert event_key(again) == text


GAUSSIAN = {"kind": "gaussian", "noise_multiplier": 1.0}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([], "must be an object"),
        ({}, "unknown privacy event kind"),
        ({"kind": ["gaussian"]}, "unknown privacy event kind"),
        ({"kind": "shuffled", "event": GAUSSIAN}, "unknown privacy event kind"),
        ({"kind": "gaussian"}, "takes exactly"),
        ({**GAUSSIAN, "sigma": 2.0}, "takes exactly"),
        ({"kind": "gaussian", "noise_multiplier": 0}, "must be in"),
        ({"kind": "gaussian", "noise_multiplier": -1.0}, "must be in"),
        ({"kind": "gaussian", "noise_multiplier": math.inf}, "finite"),
        ({"kind": "gaussian", "noise_multiplier": math.nan}, "finite"),
        ({"kind": "gaussian", "noise_multiplier": True}, "finite number"),
        ({"kind": "gaussian", "noise_multiplier": "1"}, "finite number"),
        ({"kind": "poisson-sampled", "sampling_probability": 0.0, "event": GAUSSIAN}, "must be in"),
        ({"kind": "poisson-sampled", "sampling_probability": 1.1, "event": GAUSSIAN}, "must be in"),
        ({"kind": "self-composed", "event": GAUSSIAN, "count": 0}, "whole number"),
        ({"kind": "self-composed", "event": GAUSSIAN, "count": 1.5}, "whole number"),
        ({"kind": "composed", "events": []}, "list of 1"),
        ({"kind": "composed", "events": [{"kind": "gaussian", "noise_multiplier": 0}]}, "must be in"),
        ({"kind": "zcdp", "rho": -0.1, "xi": 0.0}, "must be in"),
        (
            {"kind": "sampled-without-replacement", "source_dataset_size": 5, "sample_size": 6, "event": GAUSSIAN},
            "exceeds",
        ),
        (
            {
                "kind": "mixture-of-gaussians",
                "standard_deviation": 1.0,
                "sensitivities": [0, 1],
                "sampling_probs": [0.5],
            },
            "equally long",
        ),
        (
            {
                "kind": "mixture-of-gaussians",
                "standard_deviation": 1.0,
                "sensitivities": [0, 1],
                "sampling_probs": [0.5, 0.4],
            },
            "sum to 1",
        ),
        ({"kind": "repeat-and-select", "event": GAUSSIAN, "mean": 0.5, "shape": 1.0}, "must be in"),
    ],
)
def test_what_is_not_an_event_is_refused(value, message):
    with pytest.raises(ValueError, match=message):
        event_from_json(value)


def test_nesting_has_a_limit():
    value = GAUSSIAN
    for _ in range(events.MAX_DEPTH + 1):
        value = {"kind": "self-composed", "event": value, "count": 1}
    with pytest.raises(ValueError, match="nested deeper"):
        event_from_json(value)


def test_events_without_a_json_form_are_refused():
    with pytest.raises(ValueError, match="no JSON form"):
        event_to_json(dp_event.UnsupportedDpEvent())


def test_whole_numbers_for_noise_become_floats():
    """dp-accounting takes an integer multiplier inside a composition for a foreign event."""
    event = events.dp_sgd(0.5, 1, 3)
    assert type(event.event.event.noise_multiplier) is float


@given(st.floats(0.1, 20.0), st.floats(1.01, 100.0))
def test_adaptive_clipping_costs_together_what_one_gaussian_costs(noise, ratio):
    count_noise = ratio * noise / 2
    update = events.adaptive_clip_noise(noise, count_noise)
    # The count is in {−½, ½}: relative to its sensitivity its multiplier is 2σ_b.
    assert update > noise
    assert update**-2 + (2 * count_noise) ** -2 == pytest.approx(noise**-2, rel=1e-9)


def test_adaptive_clipping_needs_enough_noise_on_the_count():
    with pytest.raises(ValueError, match=r"must be above 0\.5"):
        events.adaptive_clip_noise(1.0, 0.5)
