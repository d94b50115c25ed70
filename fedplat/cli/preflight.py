"""Everything that can be wrong with a job, found before a run directory exists."""

from pathlib import Path

from client_app.handler import handler_for
from fedplat.errors import UsageError, unknown_name
from fedplat.job import Job
from fedplat.model import file_sha256, read_arrays
from fedplat.task import load_examples, rehearse
from server_app.strategies import build_strategy, require_dtypes
from simulations.private_job import with_privacy_pinned


def prepare(job: Job) -> Job:
    """Check strategy, task, data, partition and model for real; pin the file that training starts from."""
    if job.task.init_from is not None and job.task.init_sha256 is None:
        pinned = job.task.model_copy(update={"init_sha256": file_sha256(Path(job.task.init_from))})
        job = job.model_copy(update={"task": pinned})
    build_strategy(job)
    job = with_privacy_pinned(job)
    handler = handler_for(job.canonical())  # stays warm for the run
    require_dtypes(job, {name: str(array.dtype) for name, array in read_arrays(handler.state).items()})
    measured = rehearse(handler.task, job.task.name, handler.data.examples)
    if job.evaluation.server:
        load_examples(handler.task, job.task.name, "test")
    if job.evaluation.metric not in measured:
        raise UsageError(f"evaluation.metric: {unknown_name('metric', job.evaluation.metric, measured)}")
    return job
