"""Run a job on virtual clients: the real ServerApp code and the real ClientApp, joined by a LocalGrid."""

from collections.abc import Callable

from flwr.serverapp import Grid

from client_app.app import app as client_app
from fedplat.events import Listener
from fedplat.job import Job
from fedplat.rundir import RunDirectory
from fedplat.wire import JOB_KEY
from server_app.run import require_resumable, resume_run, start_run
from simulations.choose import make_engine, settle_engine
from simulations.local_grid import LocalGrid
from simulations.private_job import with_privacy_pinned


def simulate(job: Job, run: RunDirectory, listeners: tuple[Listener, ...] = ()) -> None:
    """Drive a new run to its end."""
    settled = _settled(job, run)
    _with_grid(settled, run, lambda grid: start_run(settled, grid, run, listeners))


def resume(run: RunDirectory, listeners: tuple[Listener, ...] = ()) -> None:
    """Drive a stopped run to its end."""
    require_resumable(run)  # before an engine opens (or makes) a ledger
    _with_grid(_settled(run.job(), run), run, lambda grid: resume_run(grid, run, listeners))


def _settled(job: Job, run: RunDirectory) -> Job:
    """The job with its engine settled once, in the run's own job file: a resumed run must not choose again."""
    settled, _ = settle_engine(with_privacy_pinned(job))
    if settled != job:
        run.write_job(settled)
    return settled


def _with_grid(job: Job, run: RunDirectory, drive: Callable[[Grid], None]) -> None:
    """Give `drive` the job's clients on the engine that the job names."""
    if job.simulation.engine == "ray":
        from simulations.ray_engine import run_on_ray

        run_on_ray(job, drive)
        return
    engine = make_engine(job, client_app, run.ledger_file)
    try:
        drive(LocalGrid(client_app, job.cohort.clients, {JOB_KEY: job.canonical()}, engine))
    finally:
        engine.close()
