"""Learning-rate schedules over rounds: start at one after warm-up, end where they say, never rise on the way."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from client_app.schedule import learning_rate, schedule_factor
from fedplat.job import validate_job
from fedplat.job_sections import Schedule

LAWS = settings(max_examples=80, deadline=None)
KINDS = ("constant", "step", "exponential", "cosine", "linear")
schedules = st.builds(
    Schedule,
    kind=st.sampled_from(KINDS),
    gamma=st.floats(0.01, 1),
    every=st.integers(1, 20),
    floor=st.floats(0, 1),
    warmup=st.integers(0, 10),
)


@LAWS
@given(schedules, st.integers(1, 200))
def test_factor_is_one_in_the_first_round_after_warm_up(schedule: Schedule, rounds: int) -> None:
    assert schedule_factor(schedule, schedule.warmup + 1, rounds) == 1.0


@LAWS
@given(schedules, st.integers(1, 200))
def test_factor_rises_linearly_in_warm_up_and_never_after_it(schedule: Schedule, rounds: int) -> None:
    factors = [schedule_factor(schedule, n, rounds) for n in range(1, rounds + 1)]
    warm, rest = factors[: schedule.warmup], factors[schedule.warmup :]
    assert warm == [n / (schedule.warmup + 1) for n in range(1, len(warm) + 1)]
    assert all(later <= earlier + 1e-12 for earlier, later in pairwise(rest))
    assert all(0 <= factor <= 1 for factor in factors)


@LAWS
@given(st.sampled_from(["cosine", "linear"]), st.floats(0, 1), st.integers(0, 10), st.integers(2, 200))
def test_cosine_and_linear_end_at_their_floor(kind: str, floor: float, warmup: int, more: int) -> None:
    schedule = Schedule.model_validate({"kind": kind, "floor": floor, "warmup": warmup})
    rounds = warmup + more
    assert schedule_factor(schedule, rounds, rounds) == pytest.approx(floor, abs=1e-12)
    middle = schedule_factor(schedule, warmup + 1 + (more - 1) // 2, rounds)
    if (more - 1) % 2 == 0:
        assert middle == pytest.approx((1 + floor) / 2, abs=1e-12)


@LAWS
@given(st.floats(0.01, 1), st.integers(1, 20), st.integers(1, 100))
def test_step_falls_by_gamma_every_so_many_rounds(gamma: float, every: int, number: int) -> None:
    schedule = Schedule(kind="step", gamma=gamma, every=every)
    here, later = (schedule_factor(schedule, n, 1000) for n in (number, number + every))
    assert later == pytest.approx(here * gamma)
    assert len({schedule_factor(schedule, n, 1000) for n in range(1, every + 1)}) == 1


@LAWS
@given(st.floats(0.01, 1), st.integers(1, 100))
def test_exponential_falls_by_gamma_every_round(gamma: float, number: int) -> None:
    schedule = Schedule(kind="exponential", gamma=gamma)
    here, later = (schedule_factor(schedule, n, 1000) for n in (number, number + 1))
    assert later == pytest.approx(here * gamma)


@pytest.mark.parametrize("kind", KINDS)
def test_a_job_of_one_round_trains_at_its_full_rate(kind: str) -> None:
    assert schedule_factor(Schedule.model_validate({"kind": kind}), 1, 1) == 1.0


def test_a_clients_own_rate_replaces_the_jobs_and_follows_the_schedule() -> None:
    local = {
        "lr": 0.5,
        "lr_by_client": {"client-3": 0.01},
        "schedule": {"kind": "exponential", "gamma": 0.5},
    }
    job = validate_job({"local": local}, "test")
    assert [learning_rate(job, "client-3", n) for n in (1, 2, 3)] == [0.01, 0.005, 0.0025]
    assert [learning_rate(job, "client-30", n) for n in (1, 2, 3)] == [0.5, 0.25, 0.125]
