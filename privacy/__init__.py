"""Differential privacy: randomness, mechanisms, plans, accounting, ledger. Pure: no Flower, no training loop."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedplat.job import Job
    from privacy.plan import PrivacyPlan


def plan_of(job: "Job") -> "PrivacyPlan | None":
    """The plan of a job, None without [privacy]: accountants take a second to load, and other jobs need none."""
    if job.privacy is None:
        return None
    from privacy.plan import plan_privacy

    return plan_privacy(job)
