"""Run a job on virtual clients: the real ServerApp code and the real ClientApp, joined by a LocalGrid."""

from client_app.app import app as client_app
from fedplat.events import Listener
from fedplat.flower import quiet_logging
from fedplat.job import Job
from fedplat.rundir import RunDirectory
from fedplat.wire import JOB_KEY
from server_app.run import resume_run, start_run
from simulations.local_grid import LocalGrid


def simulate(job: Job, run: RunDirectory, listeners: tuple[Listener, ...] = ()) -> None:
    """Drive a new run to its end."""
    start_run(job, _grid(job), run, listeners)


def resume(run: RunDirectory, listeners: tuple[Listener, ...] = ()) -> None:
    """Drive a stopped run to its end."""
    resume_run(_grid(run.job()), run, listeners)


def _grid(job: Job) -> LocalGrid:
    quiet_logging()
    return LocalGrid(client_app, job.cohort.clients, {JOB_KEY: job.canonical()})
