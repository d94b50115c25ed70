"""Spend before release: what a private request costs is in a ledger, durably, before anything is computed.

At a site that is the site's own ledger, named by its own file ($FEDPLAT_SITE): no ledger, no budget left or no dataset
for the task means no training, and the server gets a polite refusal. In a simulation the ledger is the simulation's own
(`simulations/accounted_engine.py`) and has been charged when a virtual client gets its request.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from flwr.app import Context

from client_app.admission import require_agreement, required_site
from fedplat.errors import JobError, UsageError
from fedplat.job import Job
from fedplat.wire import SIMULATED, Identity

if TYPE_CHECKING:  # accountants and ledger take a second to load, and other jobs need neither
    from privacy.ledger import Charge, Ledger, Reservation
    from privacy.plan import PrivacyPlan
    from privacy.site_budgets import Site

logger = logging.getLogger(__name__)
Purpose = Literal["train", "evaluate"]
FEWEST_EXAMPLES = 2


@contextmanager
def spending(
    job: Job,
    plan: "PrivacyPlan | None",
    identity: Identity,
    context: Context | None,
    purpose: Purpose,
    examples: int,
    *,
    alone: bool = False,
) -> Iterator[None]:
    """Run a block that computes a release; whatever goes wrong in it is told to nobody but the site's own log.

    `alone`: nobody else serves this site's requests, so a reservation that a crash left open pays for the same release
    when it is asked for again, and being stopped leaves it open.
    """
    if plan is None:
        yield
        return
    require_enough_examples(plan, purpose, examples)
    if context is not None and context.node_config.get(SIMULATED):
        with _silent_failures():
            yield
        return
    from privacy.site_budgets import open_site_ledger

    site = required_site()
    require_agreement(site, job, plan.section, identity)
    with open_site_ledger(site) as ledger:
        reservations = _reserve(ledger, site, job, plan, identity, purpose, examples, alone)
        try:
            with _silent_failures():
                yield
        except BaseException as error:
            if not alone or isinstance(error, Exception):
                ledger.commit(reservations, "failed")
            raise
        ledger.commit(reservations)


def require_enough_examples(plan: "PrivacyPlan", purpose: Purpose, examples: int) -> None:
    """One example can't hide among others."""
    if plan.section.unit == "sample" and purpose == "train" and examples < FEWEST_EXAMPLES:
        raise UsageError(f"private training needs at least {FEWEST_EXAMPLES} examples at a site")


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


def _reserve(
    ledger: "Ledger",
    site: "Site",
    job: Job,
    plan: "PrivacyPlan",
    identity: Identity,
    purpose: Purpose,
    examples: int,
    alone: bool,
) -> "list[Reservation]":
    from dp_accounting import NoOpDpEvent

    from privacy.ledger import Charge, Refusal, ReleaseIdentity
    from privacy.site_budgets import account_for

    account = account_for(site, job.task.name, plan.section.unit, plan.relation)
    budget = ledger.balance(account).epsilon or 0.0
    charge = charge_of(account, job, plan, identity, purpose, examples, budget)
    reservations = []
    if plan.section.unit == "client":
        # Amplification by sampling holds only if a site pays whether it is sampled or not: the whole job, once. Its
        # rounds then cost nothing more, but are counted: each once, and as many repeats as the charge has spare rounds.
        # A sampled site would otherwise serve the same job from the start again and again, for one charge.
        whole = ReleaseIdentity(job.digest, 0, 0, identity.client)
        reservations.append(ledger.reserve(Charge(account, whole, plan.job_event(), plan.relation, purpose="job")))
        charge = replace(charge, event=NoOpDpEvent(), most_repeats=plan.section.spare_rounds)
    unsettled = ledger.unsettled(charge) if alone else None
    if unsettled is not None:
        return [*reservations, unsettled]
    (result,) = ledger.reserve_all([charge], most_releases(plan, purpose))
    if isinstance(result, Refusal):
        raise result.error
    return [*reservations, result]


@contextmanager
def _silent_failures() -> Iterator[None]:
    """An error's text may quote data: it stays at the site."""
    try:
        yield
    except Exception:
        logger.exception("private training failed")
        raise JobError("private training failed at this site: the reason is in its own log") from None
