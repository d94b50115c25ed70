"""Everything that can be wrong with a job, found before a run directory exists."""

from pathlib import Path

from fedplat.federation import FederationData
from fedplat.job import Job
from fedplat.model import build_model, file_sha256, travelling_state
from fedplat.task import rehearse
from fedplat.tasks import load_task
from server_app.strategies import build_strategy


def prepare(job: Job) -> Job:
    """Check strategy, task, data, partition and model for real; pin the file that training starts from."""
    if job.task.init_from is not None and job.task.init_sha256 is None:
        pinned = job.task.model_copy(update={"init_sha256": file_sha256(Path(job.task.init_from))})
        job = job.model_copy(update={"task": pinned})
    build_strategy(job)
    task = load_task(job)
    data = FederationData(job, task)
    rehearse(task, job.task.name, data.examples)
    travelling_state(build_model(job, task), job.task.freeze)
    return job
