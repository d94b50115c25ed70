"""A private job as a simulation runs it: sample rate, participations and noise solved for its own data and cohorts."""

from fedplat.federation import FederationData
from fedplat.job import Job
from fedplat.tasks import load_task
from server_app.participation import most_participations


def with_privacy_pinned(job: Job) -> Job:
    """The job with every number of its privacy written out; one that has them all, or none, stays as it is."""
    if job.privacy is None:
        return job
    from privacy.plan import (  # accountants and ledger take a second to load, and other jobs need neither
        pin_privacy,
        plan_privacy,
    )

    if job.privacy.unit == "client":
        return pin_privacy(job, [0] * job.cohort.clients, job.job.rounds)
    public = job.model_copy(update={"privacy": None})
    data = FederationData(public, load_task(public))
    sizes = [len(data.rows(name).train) for name in data.names()]
    pinned = pin_privacy(job, sizes, most_participations(job))
    plan = plan_privacy(pinned)
    assert plan is not None
    for size in set(sizes):
        plan.truncation_slack(size)  # refuses a job whose truncated batches would cost too much
    return pinned
