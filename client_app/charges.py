"""What a private request costs, as charges to a ledger.

Unit sample: each release by itself. Unit client: the whole job, once, whoever is sampled for its rounds; the rounds
then cost nothing more, but are counted, each once and as many repeats as the charge has spare rounds. A sampled client
would otherwise serve the same job from the start again and again, for one charge.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from fedplat.job import Job
from fedplat.wire import Identity

if TYPE_CHECKING:  # accountants and ledger take a second to load, and other jobs need neither
    from privacy.ledger import Charge
    from privacy.plan import PrivacyPlan

Purpose = Literal["train", "evaluate"]


def charge_of(
    account: str,
    job: Job,
    plan: "PrivacyPlan",
    identity: Identity,
    purpose: Purpose,
    examples: int,
    budget_epsilon: float = 0.0,
) -> "Charge":
    """What a request costs the client that answers it, out of a budget over all jobs if it has one."""
    from privacy.ledger import Charge, ReleaseIdentity

    event = plan.evaluation_event if purpose == "evaluate" else plan.round_event
    return Charge(
        account=account,
        identity=ReleaseIdentity(job.digest, identity.round, identity.attempt, identity.client),
        event=event,
        relation=plan.relation,
        delta_slack=plan.truncation_slack(examples, budget_epsilon) if purpose == "train" else 0.0,
        purpose=purpose,
        insecure_noise=plan.section.insecure_noise,
    )


def most_releases(plan: "PrivacyPlan", purpose: Purpose) -> int:
    """How many releases of one client the job's claim covers."""
    return plan.evaluations if purpose == "evaluate" else plan.releases


def needs_admission(plan: "PrivacyPlan | None") -> bool:
    """Is a site to be charged before anybody is sampled? Amplification by secret sampling holds only if it pays
    whether it is sampled or not."""
    return plan is not None and plan.section.unit == "client" and plan.section.sampling in ("poisson", "fixed")


def whole_job(account: str, job: Job, plan: "PrivacyPlan", client: str) -> "Charge":
    """All rounds of a job at once, spare ones included."""
    from privacy.ledger import Charge, ReleaseIdentity

    return Charge(account, ReleaseIdentity(job.digest, 0, 0, client), plan.job_event(), plan.relation, purpose="job")


def counted(charge: "Charge", plan: "PrivacyPlan") -> "Charge":
    """A release that the whole job's charge has paid for: it costs nothing, and counts."""
    from dp_accounting import NoOpDpEvent

    return replace(charge, event=NoOpDpEvent(), most_repeats=plan.section.spare_rounds)
