"""A site's door: which jobs it serves, decided by its own file before any of a job's code or data is touched.

At a site ($FEDPLAT_SITE) a job runs on a dataset that the site listed for its task, reads the files that the site
names, and is private unless the site says otherwise. A private job comes with its noise: a site checks and charges, it
never solves. Refusals here depend on the job and the site's file only, so they are told to the server in full; what
goes wrong while a private job's data and model are loaded may quote data, and stays in the site's own log. Nothing is
loaded for a release that the budget would not pay for: whether loading succeeds may tell something about the data.

Virtual clients pass: their job was checked, and its spends are in the simulation's ledger. Without a site file other
jobs pass too (plain Flower), private ones don't.
"""

import logging
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from client_app.charges import Purpose, charge_of, counted, most_releases, needs_admission, whole_job
from fedplat.errors import JobError, UsageError
from fedplat.job import Job
from fedplat.partition_spec import Explicit
from fedplat.privacy_section import PrivacySection
from fedplat.wire import Identity
from privacy import plan_of
from privacy.site_budgets import account_for, dataset_for, site_from_environment
from privacy.site_policy import PolicyRefusal

if TYPE_CHECKING:
    from privacy.site_budgets import Site

logger = logging.getLogger(__name__)
DATA = "FEDPLAT_DATA"


@contextmanager
def admitted(job: Job, identity: Identity, purpose: Purpose | None = None) -> Iterator[None]:
    """Run a block that loads a job's task, data and model at a site, if the site agrees to the job and can pay for it.

    `purpose`: the release that this identity asks for; without, the job's first one, and a job that has been charged
    before is loaded again, so that what it paid for can be delivered after a crash.
    """
    site = site_from_environment() if job.privacy is None else required_site()
    if site is None:
        yield
        return
    folder = require_door(site, job)
    if job.privacy is None:
        with _data_from(folder):
            yield
        return
    require_agreement(site, job, job.privacy, identity)
    require_budget(site, job, identity, purpose)
    with _data_from(folder), _silent_loading():
        yield


def required_site() -> "Site":
    """The site whose budget a private job spends."""
    site = site_from_environment()
    if site is None:
        raise UsageError(
            "a private job spends this site's own budget, and $FEDPLAT_SITE names no site file. Make one with: "
            "fedplat budget --init"
        )
    return site


def sole_owner(job: Job, client: str) -> str | None:
    """Whose own data the files are that a job reads here: this client's at a site, unless its file says otherwise.

    They are then not dealt out by the job's partition: one record more would move hundreds of others from client to
    client, and whether they can be dealt at all would tell how many there are.
    """
    site = site_from_environment()
    if site is None:
        return None
    return client if site.datasets[dataset_for(site, job.task.name)].share == "whole" else None


def require_budget(site: "Site", job: Job, identity: Identity, purpose: Purpose | None) -> None:
    """Refuse what the budget could not pay for, before anything is loaded. Writes nothing; the reservation decides.

    The additional δ of truncated batches depends on the number of examples, and is left to the reservation.
    """
    from privacy.site_budgets import open_site_ledger

    plan = plan_of(job)
    assert plan is not None
    account = account_for(site, job.task.name, plan.section.unit, plan.relation)
    with open_site_ledger(site) as ledger:
        if purpose is None and ledger.events(account, job.digest):
            return
        charge = charge_of(account, job, plan, identity, purpose or "train", examples=1)
        refused = None
        if plan.section.unit == "client":
            whole = whole_job(account, job, plan, identity.client)
            if purpose is not None and needs_admission(plan) and ledger.whole_job(whole) is None:
                raise not_admitted(job)
            refused, charge = ledger.refusal(whole), counted(charge, plan)
        refused = refused or ledger.refusal(charge, most_releases(plan, purpose or "train"))
    if refused is not None:
        raise refused


def not_admitted(job: Job) -> UsageError:
    """A site that was only charged when sampled would pay for a part of what amplification by sampling assumes."""
    return UsageError(
        f"job '{job.digest[:12]}' was not admitted here: with privacy.sampling = "
        f"'{job.privacy.sampling if job.privacy else ''}' a site reserves the whole job before anybody is sampled. "
        "Ask every site with query.admit first"
    )


def require_agreement(site: "Site", job: Job, section: PrivacySection, identity: Identity) -> None:
    """What a private job must be for this site to charge a round of it. Nothing is computed to find out."""
    require_terms(site, job, section)
    if not 1 <= identity.round <= job.job.rounds:
        raise UsageError(
            f"round {identity.round} is none of this job's rounds, 1 to {job.job.rounds}: its charge covers no other"
        )


def require_terms(site: "Site", job: Job, section: PrivacySection) -> None:
    """The same for the job as a whole."""
    account_for(site, job.task.name, section.unit, section.relation)
    if section.insecure_noise:
        raise UsageError(
            "privacy.insecure_noise: who sent this job can predict its noise and subtract it. That is for simulations; "
            "a site refuses it"
        )
    if section.noise_multiplier is None:
        raise UsageError(
            "privacy.noise_multiplier is missing: a site does not solve for it. Send the job that "
            "`fedplat job run-config` prints, its noise is written out"
        )


def require_door(site: "Site", job: Job) -> Path | None:
    """Refuse a job that the site's file does not admit.

    Returns the directory that the site gives its task, None for the node's own $FEDPLAT_DATA.
    """
    name = dataset_for(site, job.task.name)
    dataset = site.datasets[name]
    if job.privacy is None and not dataset.allow_non_private:
        raise UsageError(
            f"site '{site.name}' serves the task '{job.task.name}' only to private jobs. Add [privacy] to the job. "
            f"Only the site can allow others, by allow_non_private = true under [datasets.{name}] in its own file"
        )
    if job.data.dir is not None:
        raise UsageError(
            f"data.dir = '{job.data.dir}': a job does not choose which files a site reads. Leave it out: the site's "
            f"own $FEDPLAT_DATA or `dir` under [datasets.{name}] in its file decides"
        )
    spec = job.data.partition
    if dataset.share == "partition" and isinstance(spec, Explicit) and spec.file is not None:
        raise UsageError(
            f"data.partition.file = '{spec.file}': a site opens no file of a job's choice. Give the lists themselves "
            "as data.partition.indices, or another kind of partition"
        )
    if job.task.init_from is not None and job.task.init_sha256 is None:
        raise UsageError(
            "task.init_from without task.init_sha256: a site opens a file that a job names only if the job says what "
            "is in it. Give its SHA-256"
        )
    _require_few_steps(site, job)
    return None if dataset.dir is None else site.path.parent / dataset.dir


def _require_few_steps(site: "Site", job: Job) -> None:
    """With much noise a million steps cost almost no ε, and a site's day."""
    rate = job.privacy.sample_rate if job.privacy is not None else None
    steps = job.local.steps or (math.ceil((job.local.epochs or 1) / rate) if rate else 0)
    if steps > site.policy.max_steps:
        most = site.policy.max_steps
        raise PolicyRefusal("max_steps", f"a round has {steps} local steps, site '{site.name}' allows {most}")


@contextmanager
def _data_from(folder: Path | None) -> Iterator[None]:
    """Let tasks read from this directory. $FEDPLAT_DATA is where `fedplat.tasks.data_dir` looks when a job names none,
    and the job itself can't be changed: its digest is its identity."""
    before = os.environ.get(DATA)
    if folder is not None:
        os.environ[DATA] = str(folder)
    try:
        yield
    finally:
        if before is not None:
            os.environ[DATA] = before
        elif folder is not None:
            os.environ.pop(DATA, None)


@contextmanager
def _silent_loading() -> Iterator[None]:
    try:
        yield
    except Exception:
        logger.exception("a private job could not be loaded")
        raise JobError("this site could not load the private job: the reason is in its own log") from None
