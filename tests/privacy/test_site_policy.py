"""`[policy]` of a site's file: hours mean what a clock on the wall shows, and nonsense is refused."""

from datetime import datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from privacy.site_policy import POLICY_TEMPLATE, PolicySection

DAY_MINUTES = 24 * 60
minutes = st.integers(0, DAY_MINUTES - 1)


def clock(minute: int) -> str:
    return f"{minute // 60:02d}:{minute % 60:02d}"


def open_minutes(start: int, end: int) -> set[int]:
    """Independently: walk the clock from start until it shows end."""
    found, minute = set(), start
    while minute != end:
        found.add(minute)
        minute = (minute + 1) % DAY_MINUTES
    return found


@given(minutes, minutes)
@settings(max_examples=40, deadline=None)
def test_open_hours_are_the_minutes_from_start_to_end_also_across_midnight(start, end):
    if start == end:
        return
    policy = PolicySection(hours=f"{clock(start)}-{clock(end)}")
    midnight = datetime(2026, 2, 28)
    shown = {m for m in range(DAY_MINUTES) if policy.is_open(midnight + timedelta(minutes=m, seconds=m % 60))}
    assert shown == open_minutes(start, end)
    assert len(shown) == (end - start) % DAY_MINUTES


def test_without_hours_a_site_is_always_open():
    assert all(PolicySection().is_open(datetime(2026, 1, 1, hour)) for hour in range(24))


BAD = {
    "the same minute": {"hours": "08:00-08:00"},
    "hour 24": {"hours": "08:00-24:00"},
    "minute 60": {"hours": "08:60-09:00"},
    "one digit": {"hours": "8:00-9:00"},
    "a line more": {"hours": "08:00-09:00\n"},
    "no end": {"hours": "08:00"},
    "no cohort": {"min_cohort": 0},
    "half a cohort": {"min_cohort": 1.5},
    "a cohort in words": {"min_cohort": "2"},
    "yes": {"require_secure_aggregation": 1},
    "no time": {"max_seconds": 0.0},
    "endless": {"max_seconds": float("inf")},
    "not a number": {"max_epsilon_per_job": float("nan")},
    "negative noise": {"min_noise_multiplier": -1.0},
    "negative age": {"max_job_age_days": -1.0},
    "unknown rule": {"min_cohorts": 2},
}


@pytest.mark.parametrize("table", BAD.values(), ids=BAD.keys())
def test_a_rule_that_makes_no_sense_is_refused(table):
    with pytest.raises(ValidationError):
        PolicySection.model_validate(table)


def test_the_template_names_every_rule():
    for rule in PolicySection.model_fields:
        assert f"# {rule} = " in POLICY_TEMPLATE
