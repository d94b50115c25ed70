"""Laws of the ledger: spent adds up, never shrinks, never exceeds; what is refused leaves no trace."""

import fcntl
import os
import time

import pytest
from dp_accounting import ComposedDpEvent, NonPrivateDpEvent
from hypothesis import given, settings
from hypothesis import strategies as st

from fedplat.errors import JobError, UsageError
from privacy import ledger_creation, ledger_store
from privacy.accounting import epsilon, rdp_curve
from privacy.events import dp_sgd, gaussian
from privacy.ledger import Budget, BudgetExceeded, Charge, Ledger, Refusal, ReleaseIdentity, Reservation, Terms
from privacy.renyi_filter import RenyiBudget
from tests.privacy.ledgers import ACCOUNT, BUDGET, charge, fill, new_ledger

EVENTS = st.one_of(
    st.builds(gaussian, st.floats(0.5, 50)),
    st.builds(dp_sgd, st.floats(0.001, 0.2), st.floats(0.7, 3), st.integers(1, 50)),
)


@pytest.fixture
def ledger(tmp_path):
    with new_ledger(tmp_path / "ledger.sqlite") as made:
        yield made


def simulated(tmp_path, clients: int) -> tuple[Ledger, list[Terms]]:
    made = Ledger.create(tmp_path / "ledger.sqlite", "simulation")
    terms = [Terms(f"client-{i}/sample", f"client-{i}", "sample", "add-remove", None, 1e-5) for i in range(clients)]
    made.open_accounts(terms)
    return made, terms


@given(events=st.lists(EVENTS, min_size=1, max_size=12), commits=st.data())
@settings(deadline=None, max_examples=25)
def test_running_total_equals_recomputation_from_the_events(tmp_path_factory, events, commits):
    with new_ledger(tmp_path_factory.mktemp("law") / "ledger.sqlite") as ledger:
        granted = []
        for number, event in enumerate(events):
            identity = ReleaseIdentity("job", number, 0, "client")
            asked = float(rdp_curve(event, [6.0])[0])
            spent = ledger.balance(ACCOUNT).rdp_spent
            (result,) = ledger.reserve_all([Charge(ACCOUNT, identity, event, "add-remove")])
            fits = RenyiBudget(8.0, 1e-6, 6.0).capacity
            if isinstance(result, Reservation):
                granted.append(event)
                if commits.draw(st.booleans()):
                    ledger.commit([result])
                assert spent + asked <= fits
            else:
                assert spent + asked > fits * (1 - 1e-12)
        balance = ledger.balance(ACCOUNT)
        whole = float(rdp_curve(ComposedDpEvent(granted), [6.0])[0]) if granted else 0.0
        assert balance.rdp_spent == pytest.approx(whole, rel=1e-12) and balance.rdp_spent <= fits
        assert balance.releases == len(granted) == sum(count for _, count in ledger.events(ACCOUNT))
        assert rdp_curve(ledger.spent_event(ACCOUNT), [6.0])[0] == pytest.approx(whole, rel=1e-9)
        ledger.verify()


def test_a_filters_epsilon_is_no_less_than_that_of_the_same_events_fixed_in_advance(ledger):
    fill(ledger, 20)
    assert ledger.balance(ACCOUNT).spent_epsilon >= epsilon(ledger.spent_event(ACCOUNT), 1e-6)


def test_spent_counts_reservations_and_commits_alike_and_never_shrinks(ledger):
    first, second = ledger.reserve(charge(0)), ledger.reserve(charge(1))
    before = ledger.balance(ACCOUNT)
    ledger.commit([first])
    ledger.commit([second], "failed")
    after = ledger.balance(ACCOUNT)
    assert before.reserved_epsilon == before.spent_epsilon == after.spent_epsilon
    assert after.reserved_epsilon == 0
    assert after.spent_epsilon + after.left_epsilon == pytest.approx(8.0)


def test_what_would_exceed_is_refused_with_what_is_left_and_leaves_no_trace(ledger):
    fill(ledger, 3)
    head, left = ledger.head(), ledger.balance(ACCOUNT).left_epsilon
    with pytest.raises(BudgetExceeded, match=r"over the budget of 8 .* is left\. Nothing was computed") as refused:
        ledger.reserve(charge(noise=0.1))
    assert refused.value.left == pytest.approx(left) and refused.value.asked > left
    assert ledger.head() == head
    ledger.reserve(charge(4))  # a smaller one still fits


def test_a_restart_resets_nothing(tmp_path):
    path, spent = tmp_path / "ledger.sqlite", []
    new_ledger(path).close()
    with pytest.raises(BudgetExceeded):
        for number in range(1000):
            with Ledger.open(path, "hospital", verify=False) as ledger:  # the accountant of every round is a new one
                ledger.reserve(charge(number))
                spent.append(ledger.balance(ACCOUNT).spent_epsilon)
    assert spent == sorted(spent) and spent[-1] <= 8 and len(spent) == 48


def test_two_jobs_share_one_budget(tmp_path):
    path = tmp_path / "ledger.sqlite"
    new_ledger(path).close()
    big = {"noise": 1.0}  # costs 3 of 5.78: one fits, two don't
    with Ledger.open(path) as one, Ledger.open(path) as other:
        one.reserve(charge(job="one", **big))
        with pytest.raises(BudgetExceeded):
            other.reserve(charge(job="other", **big))


def test_the_same_round_again_is_a_new_spend(ledger):
    tokens = {ledger.reserve(charge(7)).token for _ in range(3)}
    assert len(tokens) == 3 and ledger.balance(ACCOUNT).releases == 3


def test_a_whole_job_is_reserved_once_and_found_again(ledger):
    first = ledger.reserve(charge(purpose="job"))
    spent = ledger.balance(ACCOUNT)
    assert ledger.reserve(charge(purpose="job")) == first and ledger.balance(ACCOUNT) == spent
    ledger.commit([first])
    again = ledger.reserve(charge(purpose="job"))
    assert (again.token, again.outcome) == (first.token, "released")
    with pytest.raises(UsageError, match="has reserved another event before"):
        ledger.reserve(charge(purpose="job", noise=4.0))
    assert ledger.reserve(charge(purpose="job", job="another")).token != first.token


def test_a_commit_once_more_is_harmless_and_never_a_refund(ledger):
    reservation = ledger.reserve(charge())
    ledger.commit([reservation], "failed")
    spent = ledger.balance(ACCOUNT).spent_epsilon
    for outcome in ("failed", "released", "released"):
        ledger.commit([reservation], outcome)
    assert ledger.balance(ACCOUNT).spent_epsilon == spent
    assert "released after all" in ledger.history(ACCOUNT)[-1].body["text"]
    ledger.verify()


def test_a_forged_reservation_can_not_be_committed(ledger):
    real = ledger.reserve(charge())
    forged = Reservation("0" * 32, real.seq, real.account, real.digest)
    with pytest.raises(JobError, match="is not this reservation"):
        ledger.commit([forged])


def test_many_accounts_in_one_transaction_each_granted_or_refused_alone(tmp_path):
    ledger, terms = simulated(tmp_path, 2000)
    with ledger:
        before = ledger.head().seq
        first = ledger.reserve_all([charge(1, account=term.account) for term in terms])
        ledger.commit(first)
        assert ledger.counter.read().generation == 4  # made, opened, reserved, committed: one transaction each
        assert ledger.head().seq == before + 4000
        second = ledger.reserve_all([charge(2, account=term.account) for term in terms[:3]], cap=1)
        assert [type(result) for result in second] == [Refusal] * 3
        assert "has had 1 releases (train) of the 1" in second[0].reason
        mixed = ledger.reserve_all(
            [charge(3, account=term.account) for term in terms[:2]], cap={terms[0].account: 1, terms[1].account: 2}
        )
        assert [type(result) for result in mixed] == [Refusal, Reservation]
        assert ledger.verify() == ledger.head()
        (most,) = ledger.balances(most_spent=1)
        assert most.account == terms[1].account and most.left_epsilon is None
        assert most.spent_epsilon == pytest.approx(epsilon(gaussian(5.0, 2), 1e-5))


def test_the_cap_counts_each_purpose_and_each_job_by_itself(ledger):
    def granted(**fields) -> bool:
        (result,) = ledger.reserve_all([charge(**fields)], cap=2)
        return isinstance(result, Reservation)

    assert [granted(job="a") for _ in range(3)] == [True, True, False]
    assert [granted(job="b") for _ in range(3)] == [True, True, False]
    assert [granted(job="a", purpose="evaluate") for _ in range(3)] == [True, True, False]
    assert not granted(job="a")
    both = ledger.reserve_all([charge(job=job) for job in "cdcdcd"], cap=2)
    assert [isinstance(result, Reservation) for result in both] == [True] * 4 + [False] * 2
    ledger.verify()


def repeats_granted(ledger: Ledger, rounds: list[int], most_repeats: int, **fields) -> list[bool]:
    results = [ledger.reserve_all([charge(n, noise=50.0, most_repeats=most_repeats, **fields)])[0] for n in rounds]
    return [isinstance(result, Reservation) for result in results]


@given(st.lists(st.integers(0, 12), max_size=25), st.integers(0, 4), st.booleans())
@settings(deadline=None, max_examples=25)
def test_rounds_go_up_but_for_so_many_repeats(tmp_path_factory, rounds, most_repeats, at_once):
    """The rule, said once more in plain Python; in one transaction as in many, whatever other jobs do in between."""
    expected, served, repeats = [], -1, 0
    for number in rounds:
        again = number <= served
        expected.append(not again or repeats < most_repeats)
        repeats, served = repeats + (again and expected[-1]), max(served, number)
    with new_ledger(tmp_path_factory.mktemp("law") / "ledger.sqlite", None) as ledger:
        charges = [
            c
            for n in rounds
            for c in (charge(n, most_repeats=most_repeats), charge(n, job="other"), charge(n, job="o"))
        ]
        results = ledger.reserve_all(charges) if at_once else [ledger.reserve_all([c])[0] for c in charges]
        assert [isinstance(result, Reservation) for result in results[::3]] == expected
        assert all(isinstance(result, Reservation) for result in results[1::3])
        ledger.verify()


def test_repeats_are_counted_by_job_and_purpose_and_over_restarts(tmp_path):
    path = tmp_path / "ledger.sqlite"
    with new_ledger(path) as ledger:
        assert repeats_granted(ledger, [3, 3, 2], 1) == [True, True, False]
        assert repeats_granted(ledger, [1, 1, 1], 1, job="another") == [True, True, False]
        assert repeats_granted(ledger, [1, 1, 1], 1, purpose="evaluate") == [True, True, False]
    with Ledger.open(path) as ledger:
        head = ledger.head()
        with pytest.raises(BudgetExceeded, match=r"asks for round 1 after round 3.* another job\.name or job\.seed"):
            ledger.reserve(charge(1, most_repeats=1))
        assert ledger.head() == head
        assert repeats_granted(ledger, [4, 4], 1) == [True, False]


def test_equal_events_are_stored_once(ledger):
    fill(ledger, 10)
    with ledger._reading() as transaction:
        assert transaction.connection.exec_driver_sql("SELECT count(*) FROM events").scalar() == 1
    assert [count for _, count in ledger.events(ACCOUNT)] == [10]


def test_events_of_one_job(ledger):
    ledger.reserve(charge(job="a"))
    ledger.reserve(charge(job="b", noise=7.0))
    assert ledger.events(ACCOUNT, "b") == [(gaussian(7.0), 1)]
    assert len(ledger.events(ACCOUNT)) == 2


def test_a_period_starts_with_nothing_spent_and_a_clock_set_back_reopens_nothing(tmp_path, monkeypatch):
    day, start = 86_400.0, time.time()
    clock = [start]
    monkeypatch.setattr(ledger_store.time, "time", lambda: clock[0])
    with new_ledger(tmp_path / "ledger.sqlite", Budget(8.0, 1e-6, 6.0, period_days=30)) as ledger:
        old = ledger.reserve(charge(0, noise=1.0))
        with pytest.raises(BudgetExceeded):
            ledger.reserve(charge(1, noise=1.0))
        clock[0] = start + 31 * day
        assert ledger.balance(ACCOUNT).spent_epsilon == 0
        ledger.commit([old])  # belongs to the window in which it was reserved
        assert ledger.balance(ACCOUNT).reserved_epsilon == 0
        ledger.reserve(charge(2, noise=1.0))
        clock[0] = start
        with pytest.raises(BudgetExceeded):
            ledger.reserve(charge(3, noise=1.0))
        balance = ledger.balance(ACCOUNT)
        assert balance.releases == 2 and balance.period_days == 30
        assert balance.period_ends == pytest.approx(start + 60 * day, abs=1)
        ledger.verify()


OPENED = {"dataset": "digits", "unit": "sample", "relation": "add-remove"}
CHANGES = {
    "unit": (OPENED | {"unit": "client"}, BUDGET),
    "relation": (OPENED | {"relation": "zero-out"}, BUDGET),
    "delta": (OPENED, Budget(8.0, 1e-5, 6.0)),
    "order": (OPENED, Budget(8.0, 1e-6, 8.0)),
    "period_days": (OPENED, Budget(8.0, 1e-6, 6.0, 30)),
    "unlimited": (OPENED | {"delta": 1e-6}, None),
}


@pytest.mark.parametrize(("terms", "budget"), CHANGES.values(), ids=CHANGES.keys())
def test_after_a_release_only_epsilon_may_change(terms, budget, ledger, request):
    fill(ledger, 1)
    head = ledger.head()
    with pytest.raises(UsageError, match=rf"on other terms \({request.node.callspec.id} is"):
        ledger.open_account(ACCOUNT, **terms, budget=budget)
    assert ledger.head() == head


def test_a_raised_epsilon_is_recorded_and_keeps_order_and_delta(ledger):
    fill(ledger, 1)
    ledger.open_account(ACCOUNT, **OPENED, budget=Budget(9.0, 1e-6))
    balance = ledger.balance(ACCOUNT)
    assert (balance.epsilon, balance.delta, balance.order) == (9.0, 1e-6, 6.0)
    assert [entry.kind for entry in ledger.history(ACCOUNT)] == ["genesis", "budget", "reserve", "commit", "budget"]
    ledger.open_account(ACCOUNT, **OPENED, budget=Budget(9.0, 1e-6))  # the same again writes nothing
    assert len(ledger.history(ACCOUNT)) == 5
    ledger.verify()


def test_before_the_first_release_limits_are_a_draft(ledger):
    ledger.open_account(ACCOUNT, **OPENED, budget=Budget(4.0, 1e-5))
    assert ledger.balance(ACCOUNT).delta == 1e-5
    ledger.verify()


def test_additive_delta_is_charged_and_grows_with_a_raised_budget(ledger):
    ledger.reserve(charge(delta_slack=4e-9))
    assert ledger.balance(ACCOUNT).slack_spent == pytest.approx(4e-9)
    with pytest.raises(BudgetExceeded, match="additional δ of truncated batches"):
        ledger.reserve(charge(delta_slack=7e-9))
    ledger.open_account(ACCOUNT, **OPENED, budget=Budget(9.0, 1e-6))
    assert ledger.balance(ACCOUNT).slack_spent > 1.08e-8  # (1 + e^9)/(1 + e^8) times as much
    ledger.verify()


REFUSED = {
    "another relation": (charge(relation="zero-out"), "is for the relation add-remove"),
    "unknown account": (charge(account="digit/sample"), "did you mean 'digits/sample'?"),
    "no noise": (Charge(ACCOUNT, ReleaseIdentity("j", 0, 0, "c"), NonPrivateDpEvent(), "add-remove"), "not private"),
    "negative slack": (charge(delta_slack=-1.0), "delta_slack must be in"),
    "no job": (charge(job=""), "without a job"),
}


@pytest.mark.parametrize(("asked", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_a_charge_that_makes_no_sense_spends_nothing_for_anybody(asked, message, ledger):
    head = ledger.head()
    with pytest.raises(UsageError) as refused:
        ledger.reserve_all([charge(1), asked, charge(2)])
    assert message in str(refused.value) and ledger.head() == head


def test_a_budget_without_room_is_refused(ledger):
    with pytest.raises(UsageError, match="too small"):
        ledger.open_account("tiny/sample", **OPENED, budget=Budget(0.001, 1e-6))
    assert ledger.accounts() == [ACCOUNT]


def test_insecure_noise_is_written_down(ledger):
    ledger.reserve(charge(insecure_noise=True))
    assert ledger.balance(ACCOUNT).insecure_releases == 1


def test_a_dry_run_says_what_a_reservation_would_and_writes_nothing(tmp_path):
    with new_ledger(tmp_path / "ledger.sqlite") as ledger:
        while (refused := ledger.refusal(charge(ledger.balance(ACCOUNT).releases, noise=2.0))) is None:
            before = ledger.head()
            assert ledger.refusal(charge(noise=2.0), cap=ledger.balance(ACCOUNT).releases + 1) is None
            assert ledger.head() == before
            ledger.reserve(charge(ledger.balance(ACCOUNT).releases, noise=2.0))
        head, done = ledger.head(), ledger.balance(ACCOUNT).releases
        with pytest.raises(BudgetExceeded) as spent:
            ledger.reserve(charge(done, noise=2.0))
        assert str(spent.value) == str(refused) and ledger.head() == head and done > 1
        assert "releases (train) of the 1" in str(ledger.refusal(charge(done, noise=50.0), cap=1))
        whole = charge(0, noise=50.0, purpose="job")
        assert ledger.refusal(whole) is None and ledger.whole_job(whole) is None
        reserved = ledger.reserve(whole)
        assert ledger.whole_job(whole) == reserved
        with pytest.raises(UsageError, match="the two don't add up"):
            ledger.refusal(charge(0, relation="replace-one"))


def test_who_makes_a_ledger_does_not_wait_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr(ledger_creation, "LOCK_S", 0.2)
    held = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    with pytest.raises(UsageError, match="another process has held its lock"):
        Ledger.create(tmp_path / "ledger.sqlite", "hospital")
    os.close(held)
    Ledger.create(tmp_path / "ledger.sqlite", "hospital").close()


# --- what a crash left open ---------------------------------------------------------------------


def test_an_open_reservation_is_found_again_by_its_own_release_only(ledger):
    reserved = ledger.reserve(charge(1))
    assert ledger.unsettled(charge(1)) == reserved
    for other in (charge(2), charge(1, job="other"), charge(1, noise=4.0), charge(1, purpose="evaluate")):
        assert ledger.unsettled(other) is None
    head = ledger.head()
    assert ledger.unsettled(charge(1)) == reserved and ledger.head() == head  # looking is free


@pytest.mark.parametrize("outcome", ["released", "failed"])
def test_a_settled_reservation_is_not_found_again(ledger, outcome):
    ledger.commit([ledger.reserve(charge(1))], outcome)
    assert ledger.unsettled(charge(1)) is None


def test_only_the_newest_reservation_of_a_release_counts(ledger):
    """One that was left open before a later one was settled belongs to a release that may have left."""
    ledger.reserve(charge(1))
    ledger.commit([ledger.reserve(charge(1))])
    assert ledger.unsettled(charge(1)) is None
    newest = ledger.reserve(charge(1))
    assert ledger.unsettled(charge(1)) == newest
    with Ledger.open(ledger.path) as again:
        assert again.unsettled(charge(1)) == newest
        again.commit([newest])
    assert ledger.unsettled(charge(1)) is None
