"""Spend before release: what a private request costs is in a ledger, durably, before anything is computed.

At a site that is the site's own ledger, named by its own file ($FEDPLAT_SITE): no ledger, no budget left or no dataset
for the task means no training, and the server gets a polite refusal. In a simulation the ledger is the simulation's own
(`simulations/accounted_engine.py`) and has been charged when a virtual client gets its request.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from flwr.app import Context

from client_app.admission import not_admitted, require_agreement, require_door, require_terms, required_site
from client_app.charges import Purpose, charge_of, counted, most_releases, needs_admission, whole_job
from fedplat.errors import JobError, UsageError
from fedplat.job import Job
from fedplat.wire import SIMULATED, Identity
from privacy import plan_of

if TYPE_CHECKING:  # accountants and ledger take a second to load, and other jobs need neither
    from privacy.ledger import Ledger, Reservation
    from privacy.plan import PrivacyPlan
    from privacy.site_budgets import Site

logger = logging.getLogger(__name__)
FEWEST_EXAMPLES = 2
_warned: set[tuple[Path, str]] = set()
"""Datasets of which a δ that is too large was told once."""


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
    kept: bool = False,
) -> Iterator[None]:
    """Run a block that computes a release; whatever goes wrong in it is told to nobody but the site's own log.

    `alone`: nobody else serves this site's requests, so a reservation that a crash left open pays for the same release
    when it is asked for again, and being stopped leaves it open. `kept`: the bytes to be released were computed before,
    and what was paid for them is paid.
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
        _warn_about_delta(site, job, plan, examples)
        reservations = _reserve(ledger, site, job, plan, identity, purpose, examples, alone, kept)
        try:
            with _silent_failures():
                yield
        except BaseException as error:
            if not alone or isinstance(error, Exception):
                ledger.commit(reservations, "failed")
            raise
        ledger.commit(reservations)


def _warn_about_delta(site: "Site", job: Job, plan: "PrivacyPlan", examples: int) -> None:
    """Tell the site, and nobody else, that its budget's δ protects nobody among so many examples."""
    from privacy.plan import delta_warning
    from privacy.site_budgets import dataset_for

    name = dataset_for(site, job.task.name)
    warning = delta_warning(site.datasets[name].delta, examples, "examples here")
    if warning is not None and plan.section.unit == "sample" and (site.path, name) not in _warned:
        _warned.add((site.path, name))
        logger.warning("%s: datasets.%s.%s", site.path, name, warning)


def require_enough_examples(plan: "PrivacyPlan", purpose: Purpose, examples: int) -> None:
    """One example can't hide among others."""
    if plan.section.unit == "sample" and purpose == "train" and examples < FEWEST_EXAMPLES:
        raise UsageError(f"private training needs at least {FEWEST_EXAMPLES} examples at a site")


def admit_job(job: Job, identity: Identity) -> None:
    """Reserve a whole job before anybody is sampled for it: what `query.admit` asks a site for.

    Passes the same door as any request, loads nothing, and costs nothing when it is asked again.
    """
    from privacy.site_budgets import account_for, open_site_ledger

    site = required_site()
    require_door(site, job)
    if job.privacy is None or job.privacy.unit != "client":
        raise UsageError("only jobs with privacy.unit = 'client' are admitted as a whole: others pay for each release")
    require_terms(site, job, job.privacy)
    plan = plan_of(job)
    assert plan is not None
    account = account_for(site, job.task.name, plan.section.unit, plan.relation)
    with open_site_ledger(site) as ledger:
        ledger.reserve(whole_job(account, job, plan, identity.client))


def _reserve(
    ledger: "Ledger",
    site: "Site",
    job: Job,
    plan: "PrivacyPlan",
    identity: Identity,
    purpose: Purpose,
    examples: int,
    alone: bool,
    kept: bool,
) -> "list[Reservation]":
    from privacy.ledger import Refusal
    from privacy.site_budgets import account_for

    account = account_for(site, job.task.name, plan.section.unit, plan.relation)
    budget = ledger.balance(account).epsilon or 0.0
    charge = charge_of(account, job, plan, identity, purpose, examples, budget)
    reservations = []
    if plan.section.unit == "client":
        whole = whole_job(account, job, plan, identity.client)
        paid = ledger.whole_job(whole)
        if paid is None and needs_admission(plan):
            raise not_admitted(job)
        reservations.append(paid or ledger.reserve(whole))
        charge = counted(charge, plan)
    unsettled = ledger.unsettled(charge, kept=kept) if alone else None
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
