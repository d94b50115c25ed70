"""Set a run up and drive it: what the Flower ServerApp and `fedplat simulate` both call."""

import platform
from importlib.metadata import version
from typing import Literal

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
from server_app.spending import ledger_identity, require_own_ledger, witnesses_of
from server_app.strategies import build_strategy, require_dtypes

Where = Literal["simulation", "flower"]


def start_run(
    job: Job, grid: Grid, run: RunDirectory, listeners: tuple[Listener, ...] = (), where: Where = "simulation"
) -> None:
    """Drive a new run from its first round."""
    with run.locked():
        _drive(job, grid, run, listeners, where, resume=False)


def resume_run(
    grid: Grid, run: RunDirectory, listeners: tuple[Listener, ...] = (), where: Where = "simulation"
) -> None:
    """Drive a stopped run on from its last committed round."""
    with run.locked():
        require_resumable(run, where)
        _drive(run.job(), grid, run, listeners, where, resume=True)


def is_finished(run: RunDirectory) -> bool:
    return run.events_file.exists() and any(isinstance(event, RunFinished) for event in read_events(run.events_file))


def require_resumable(run: RunDirectory, where: Where = "simulation") -> None:
    """Refuse a finished run, or one that ran elsewhere, in words, before anything is loaded."""
    events = read_events(run.events_file) if run.events_file.exists() else []
    for event in events:
        if isinstance(event, RunStarted) and event.where != where:
            other = "on a real federation; virtual clients" if where == "simulation" else "in a simulation; real sites"
            raise UsageError(f"{run.path}: ran {other} can't continue it")
        if isinstance(event, RunFinished):
            raise UsageError(
                f"{run.path}: already finished after round {event.round}. Look at it with: fedplat runs show {run.path}"
            )
    # Not by its rounds: those that a crash has undone don't count in the log, and were released all the same.
    started = next((event for event in events if isinstance(event, RunStarted)), None)
    privacy = run.job().privacy
    sites_account = where == "flower" and privacy is not None and privacy.unit == "sample"
    if started is not None and privacy is not None and not sites_account:
        require_own_ledger(run, started)


def _drive(
    job: Job, grid: Grid, run: RunDirectory, listeners: tuple[Listener, ...], where: Where, *, resume: bool
) -> None:
    strategy = build_strategy(job)
    model = GlobalModel(job, load_task(job))
    require_dtypes(job, {name: str(dtype) for name, dtype in model.dtypes.items()})
    checkpoint = CheckpointStore(run.checkpoints, job.server.keep_checkpoints).latest() if resume else None
    if checkpoint is not None and checkpoint.job_digest != job.digest:
        raise UsageError(f"{run.path}: its checkpoints belong to another job than its job.toml (edited or copied?)")
    log = EventLog(run.events_file, listeners)
    try:
        driver = Driver(job, grid, strategy, model, run, log, real_sites=where == "flower")
        if checkpoint is not None:
            driver.restore(checkpoint)
        if not any(isinstance(event, RunStarted) for event in read_events(run.events_file)):
            log.append(_started(job, run, model, where))
        if resume:
            log.append(Resumed(round=checkpoint.round if checkpoint is not None else 0))
        driver.run()
    finally:
        log.close()


def _started(job: Job, run: RunDirectory, model: GlobalModel, where: Where) -> RunStarted:
    libraries = {name: version(name) for name in ("flwr", "torch", "numpy")}
    return RunStarted(
        run=run.id,
        job_digest=job.digest,
        clients=job.cohort.clients,
        rounds=job.job.rounds,
        parameters=model.num_parameters,
        where=where,
        ledger=ledger_identity(run) if job.privacy is not None else None,
        witnesses=witnesses_of(job),
        versions={"fedplat": __version__, "python": platform.python_version(), **libraries},
    )
