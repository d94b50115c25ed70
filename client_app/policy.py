"""The site's policy at work: may this signed job run here, now?

Rules come from `[policy]` and `[datasets]` of the site's own file. A refusal names its rule, so that an operator knows
whom to ask; nothing here depends on the site's data.
"""

import time
from datetime import datetime
from typing import TYPE_CHECKING

from client_app.admission import require_door
from fedplat.consortium.signed_job import SignedJob
from fedplat.federation import client_name
from fedplat.job import Job
from privacy.site_budgets import dataset_for
from privacy.site_policy import PolicyRefusal

if TYPE_CHECKING:
    from privacy.plan import PrivacyPlan
    from privacy.site_budgets import Site

CLOCK_SKEW_S = 300.0
DAY_S = 86_400.0


def own_client(job: Job, site: str) -> str:
    """The client name that this site has in a job."""
    if site not in job.cohort.sites:
        raise PolicyRefusal("sites", f"the job does not list site '{site}' in cohort.sites")
    return client_name(job.cohort.sites.index(site))


def require_allowed(
    site: "Site", signed: SignedJob, job: Job, now: float | None = None, *, known: bool = False
) -> None:
    """Refuse a job that the site's file forbids, before its task, data or model are touched.

    `known`: this site serves it already, so that it may finish however long ago it was signed.
    """
    now = time.time() if now is None else now
    policy = site.policy
    own_client(job, site.name)
    if policy.signers is not None and signed.operator not in policy.signers:
        raise PolicyRefusal("signers", f"this site serves {', '.join(policy.signers)}, not {signed.operator}")
    if signed.signed_at > now + CLOCK_SKEW_S:
        raise PolicyRefusal("max_job_age_days", "the job was signed in this site's future. Check both clocks")
    if not known and now - signed.signed_at > policy.max_job_age_days * DAY_S:
        raise PolicyRefusal("max_job_age_days", f"signed more than {policy.max_job_age_days:g} days ago. Sign it again")
    if policy.max_rounds is not None and job.job.rounds > policy.max_rounds:
        raise PolicyRefusal("max_rounds", f"the job has {job.job.rounds} rounds, this site allows {policy.max_rounds}")
    fewest = min(job.cohort.min_replies, job.cohort.cohort_size)
    if fewest < policy.min_cohort:
        raise PolicyRefusal(
            "min_cohort",
            f"a round's mean may be over {fewest} sites (cohort.min_replies), this site wants {policy.min_cohort}",
        )
    if policy.require_secure_aggregation:
        raise PolicyRefusal("require_secure_aggregation", "this version has no secure aggregation")
    if job.evaluation.clients > 0 and job.privacy is None and policy.max_evaluations == 0:
        raise PolicyRefusal("max_evaluations", "this site releases no metrics without [privacy]")
    require_door(site, job)
    _require_delta(site, job)


def _require_delta(site: "Site", job: Job) -> None:
    """A job's ε is claimed at a δ of its own; at a large one any noise claims little."""
    delta = site.datasets[dataset_for(site, job.task.name)].delta
    if site.policy.max_epsilon_per_job is not None and job.privacy is not None and job.privacy.delta > delta:
        raise PolicyRefusal(
            "max_epsilon_per_job", f"the job claims its ε at δ = {job.privacy.delta:g}, this site counts at {delta:g}"
        )


def require_hours(site: "Site", now: datetime | None = None) -> None:
    if not site.policy.is_open(now or datetime.now()):
        raise PolicyRefusal("hours", f"this site works from {site.policy.hours}")


def require_strength(site: "Site", plan: "PrivacyPlan | None") -> None:
    """A private job must be as private as the site demands."""
    policy = site.policy
    if plan is None:
        return
    added = [plan.section.noise_multiplier] + [plan.section.evaluation_noise] * (plan.evaluations > 0)
    for noise in added:
        if policy.min_noise_multiplier is not None and (noise is None or noise < policy.min_noise_multiplier):
            raise PolicyRefusal(
                "min_noise_multiplier", f"the job adds {noise}, this site wants {policy.min_noise_multiplier}"
            )
    if policy.max_epsilon_per_job is not None and plan.epsilon() > policy.max_epsilon_per_job:
        claimed, most = plan.epsilon(), policy.max_epsilon_per_job
        raise PolicyRefusal("max_epsilon_per_job", f"the job claims ε = {claimed:.3g}, this site allows {most:g}")
