"""Set a run up and drive it: what the Flower ServerApp and `fedplat simulate` both call."""

import platform
from importlib.metadata import version

from flwr.serverapp import Grid

from fedplat import __version__
from fedplat.errors import UsageError
from fedplat.events import EventLog, Listener, Resumed, RunFinished, RunStarted, read_events
from fedplat.job import Job
from fedplat.rundir import RunDirectory
from fedplat.tasks import load_task
from server_app.checkpoint import CheckpointStore
from server_app.driver import Driver
from server_app.evaluation import GlobalModel
from server_app.strategies import build_strategy


def start_run(job: Job, grid: Grid, run: RunDirectory, listeners: tuple[Listener, ...] = ()) -> None:
    """Drive a new run from its first round."""
    with run.locked():
        _drive(job, grid, run, listeners, resume=False)


def resume_run(grid: Grid, run: RunDirectory, listeners: tuple[Listener, ...] = ()) -> None:
    """Drive a stopped run on from its last committed round."""
    with run.locked():
        require_resumable(run)
        _drive(run.job(), grid, run, listeners, resume=True)


def require_resumable(run: RunDirectory) -> None:
    """Refuse a finished run, in words, before anything is loaded."""
    events = read_events(run.events_file) if run.events_file.exists() else []
    for event in events:
        if isinstance(event, RunFinished):
            raise UsageError(
                f"{run.path}: already finished after round {event.round}. Look at it with: fedplat runs show {run.path}"
            )


def _drive(job: Job, grid: Grid, run: RunDirectory, listeners: tuple[Listener, ...], *, resume: bool) -> None:
    strategy = build_strategy(job)
    task = load_task(job)
    model = GlobalModel(job, task)
    checkpoint = CheckpointStore(run.checkpoints, job.server.keep_checkpoints).latest() if resume else None
    if checkpoint is not None and checkpoint.job_digest != job.digest:
        raise UsageError(f"{run.path}: its checkpoints belong to another job than its job.toml (edited or copied?)")
    log = EventLog(run.events_file, listeners)
    try:
        driver = Driver(job, grid, strategy, model, run, log)
        if checkpoint is None:
            log.append(_started(job, run, model))
        else:
            driver.restore(checkpoint)
            log.append(Resumed(round=checkpoint.round))
        driver.run()
    finally:
        log.close()


def _started(job: Job, run: RunDirectory, model: GlobalModel) -> RunStarted:
    libraries = {name: version(name) for name in ("flwr", "torch", "numpy")}
    return RunStarted(
        run=run.id,
        job_digest=job.digest,
        clients=job.cohort.clients,
        rounds=job.job.rounds,
        parameters=model.num_parameters,
        versions={"fedplat": __version__, "python": platform.python_version(), **libraries},
    )
