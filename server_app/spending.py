"""What a private run has cost, as the server can know it: per round in the event log, and for unit client in a ledger.

Unit client: every round is a release of the federation, whoever is sampled for it. It is reserved before clients are
asked, in the run's own ledger, and refused once the plan's rounds are used up, so that repeated rounds can't stretch
the claim. Banded noise is one mechanism over all rounds: the whole job is reserved at once, and its rounds are counted.
Unit sample: clients spend, each in a ledger of its own. In a simulation the Grid knows the most that any of them has
spent; a real server can only assume the most that it may have asked of one client.

A run belongs to the ledger that it began with (its `run_started` event names it) and goes on with no other.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from fedplat.errors import JobError, UsageError
from fedplat.events import PrivacySpent, RunStarted
from fedplat.job import Job
from fedplat.rundir import RunDirectory
from privacy import plan_of
from server_app.collect import LAST_ATTEMPT

if TYPE_CHECKING:  # accountants and ledger take a second to load, and other jobs need neither
    from privacy.accounting import Accountant
    from privacy.ledger import Charge, Ledger, Reservation
    from privacy.plan import PrivacyPlan

logger = logging.getLogger(__name__)
MUCH = 100.0
ACCOUNT = "federation"
SITE = "server"


@runtime_checkable
class KnowsReleases(Protocol):
    """A Grid that keeps its clients' ledger."""

    def most_releases(self) -> int | None: ...


@dataclass(frozen=True)
class Claim:
    """ε after so many releases, and whose figure that is."""

    accountant: "Accountant"
    after: Callable[[int], float]


class RunBook:
    """The privacy of one run."""

    def __init__(self, job: Job, run: RunDirectory) -> None:
        self._job, self._plan = job, plan_of(job)
        self._reservations: list[Reservation] = []
        self._ledger: Ledger | None = None
        self._claim = None if self._plan is None else claim_of(self._plan)
        if self._plan is not None and self._plan.section.unit == "client":
            self._ledger = self._open(run, self._plan)

    def _open(self, run: RunDirectory, plan: "PrivacyPlan") -> "Ledger":
        from privacy.ledger import Ledger

        if run.ledger_file.exists():
            ledger = Ledger.open(run.ledger_file, SITE)
        else:
            ledger = Ledger.create(run.ledger_file, SITE)
        ledger.open_account(
            ACCOUNT, dataset=ACCOUNT, unit="client", relation=plan.relation, budget=None, delta=plan.section.delta
        )
        return ledger

    def reserve(self, number: int) -> None:
        """Before a round's clients are asked. Raises JobError if the plan covers no further round."""
        if self._ledger is None or self._plan is None:
            return
        from privacy.ledger import Refusal

        results = self._ledger.reserve_all(_charges(self._job, self._plan, number), self._plan.releases)
        for result in results:
            if isinstance(result, Refusal):
                raise JobError(
                    f"round {number}: the plan's {self._plan.releases} releases (privacy.spare_rounds included) are "
                    f"used up: {result.reason}"
                )
            self._reservations.append(result)

    def commit(self) -> None:
        """After the round's release."""
        if self._ledger is not None:
            self._ledger.commit([one for one in self._reservations if one.outcome is None])
        self._reservations = []

    def spent(self, number: int, known_releases: int | None) -> PrivacySpent | None:
        """What privacy has cost after this round."""
        if self._plan is None or self._claim is None:
            return None
        releases = self._releases(self._plan, number, known_releases)
        return self._event(self._plan, self._claim, number, self._claim.after(releases), releases)

    def spent_as_planned(self, number: int) -> PrivacySpent | None:
        """What privacy has cost a run that its own releases have stopped: all that was planned for.

        Composition is proven for a number of rounds fixed in advance, and here it depended on what was released.
        """
        if self._plan is None or self._claim is None:
            return None
        return self._event(self._plan, self._claim, number, self._plan.epsilon(), self._plan.releases)

    def _event(self, plan: "PrivacyPlan", claim: Claim, number: int, epsilon: float, releases: int) -> PrivacySpent:
        section = plan.section
        return PrivacySpent(
            round=number,
            unit=section.unit,
            relation=plan.relation,
            epsilon=epsilon,
            delta=section.delta,
            accountant=claim.accountant,
            releases=releases,
            trusts_server=section.unit == "client",
            insecure_noise=section.insecure_noise,
        )

    def _releases(self, plan: "PrivacyPlan", number: int, known: int | None) -> int:
        """Rounds released, repeated ones included: counted where there is a ledger, else the most there can be."""
        if self._ledger is not None:
            return _rounds_charged(self._ledger, self._job.digest, plan)
        if known is not None:
            return known
        asked = LAST_ATTEMPT if self._job.cohort.on_failure == "retry" else 1
        return min(number * asked + plan.section.spare_rounds, plan.releases)  # a site refuses more than the plan's

    def close(self) -> None:
        if self._ledger is not None:
            self._ledger.close()


def _charges(job: Job, plan: "PrivacyPlan", number: int) -> "list[Charge]":
    """What a round costs: its own event; under banded noise the whole job, once, beside a round that costs nothing."""
    from dp_accounting import NoOpDpEvent

    from privacy.ledger import Charge, ReleaseIdentity

    insecure = plan.section.insecure_noise
    identity = ReleaseIdentity(job.digest, number, 1, ACCOUNT)
    if plan.section.sampling != "banded":
        return [Charge(ACCOUNT, identity, plan.job_event(1), plan.relation, insecure_noise=insecure)]
    whole = ReleaseIdentity(job.digest, 0, 1, ACCOUNT)
    return [
        Charge(ACCOUNT, whole, plan.job_event(), plan.relation, purpose="job", insecure_noise=insecure),
        Charge(ACCOUNT, identity, NoOpDpEvent(), plan.relation, insecure_noise=insecure),
    ]


def _rounds_charged(ledger: "Ledger", job_digest: str, plan: "PrivacyPlan") -> int:
    """All reservations of this job but that of the whole job."""
    rounds = sum(count for _, count in ledger.events(ACCOUNT, job_digest))
    return rounds - (plan.section.sampling == "banded")


def claim_of(plan: "PrivacyPlan") -> Claim:
    """ε round by round where rounds are alike, one ε for all of banded noise, else (evaluations, PRV) computed anew.

    Raises UsageError if nobody gives one: before anything is released, not after.
    """
    from privacy.accountants.running import RunningEpsilon

    accountant = _claimant(plan)
    if plan.evaluations or plan.section.sampling == "banded" or accountant == "prv":
        whole = plan.epsilon()
        return Claim(accountant, plan.epsilon if plan.section.sampling != "banded" else lambda _: whole)
    running = RunningEpsilon(plan.job_event(1), plan.conversion_delta, plan.relation, accountant)
    return Claim(accountant, running.after)


def _claimant(plan: "PrivacyPlan") -> "Accountant":
    """The job's accountant, or RDP where PLD takes no such event, as in `privacy.accounting.epsilon`."""
    from privacy.accountants.pld import MIN_DELTA, taken_leaves
    from privacy.accountants.rdp import NotTaken

    if plan.section.accountant != "pld":
        return plan.section.accountant
    try:
        taken_leaves(plan.job_event(1), plan.relation)
    except NotTaken:
        return "rdp"
    return "pld" if plan.conversion_delta >= MIN_DELTA else "rdp"


def witnesses_of(job: Job) -> dict[str, float]:
    """ε of the job as planned, by every accountant that takes it; empty without [privacy].

    Raises AccountantsDisagree if two of them can't both be right: nothing is released then.
    """
    plan = plan_of(job)
    if plan is None:
        return {}
    from privacy.accounting import ACCOUNTANTS, epsilons

    found = epsilons(plan.job_event(), plan.conversion_delta, plan.relation, plan.section.accountant)
    if found.claimed > MUCH:
        logger.warning(
            "ε = %.3g: an adversary's odds may change by a factor beyond 10⁴³, which protects nobody. Add noise, or "
            "plan fewer rounds",
            found.claimed,
        )
    figures = {name: getattr(found, name) for name in ACCOUNTANTS}
    return {name: value for name, value in figures.items() if value is not None}


def ledger_identity(run: RunDirectory) -> str | None:
    """Which ledger lies in a run's directory; None if there is none (a real server of unit sample keeps none)."""
    if not run.ledger_file.exists():
        return None
    from privacy.ledger import Ledger

    with Ledger.open(run.ledger_file, readonly=True, verify=False) as ledger:
        return ledger.identity


def require_own_ledger(run: RunDirectory, started: RunStarted) -> None:
    """Refuse to go on without the ledger that the run began with: any other doesn't know what was spent."""
    found = ledger_identity(run)
    name = run.ledger_file.name
    if found is None:
        raise UsageError(
            f"{run.path}: its ledger is gone, so nobody knows what privacy it has cost: it can't go on. Put {name} and "
            "its counter back, or start anew"
        )
    if found != started.ledger:
        raise UsageError(
            f"{run.path}: {name} is not the ledger that this run began with (it has the id {found}, the run's has "
            f"{started.ledger}), so it doesn't say what the run has cost. Put its own back, or start anew"
        )
