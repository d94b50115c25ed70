"""`fedplat simulate` and `fedplat resume`."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedplat.cli.options import Engine, JobFile, Json, Overrides, Quiet, RunReference, Verbose, set_up_logging
from fedplat.cli.terminal import INTERRUPTED, console_for, loading, terminate_like_interrupt
from fedplat.errors import JobError
from fedplat.events import Listener
from fedplat.job import Job, load_job
from fedplat.rundir import RunDirectory, find_run, new_run_path

if TYPE_CHECKING:
    from rich.console import Console

Out = Annotated[Path | None, typer.Option("--out", help="Run directory to create; default: runs/ID.")]
TensorBoard = Annotated[
    bool, typer.Option("--tensorboard", help="Also write TensorBoard files into the run directory.")
]
Drive = Callable[[tuple[Listener, ...]], None]


def simulate(
    job_file: JobFile = None,
    overrides: Overrides = None,
    engine: Engine = None,
    out: Out = None,
    json_output: Json = False,
    tensorboard: TensorBoard = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Run a job on virtual clients in this process.

    Examples:

    - `fedplat simulate`  (200 clients learn handwritten digits)

    - `fedplat simulate job.toml --set cohort.fraction=0.5 --set job.rounds=20`

    - `fedplat simulate job.toml --engine process --out runs/mine --json`
    """
    started = time.perf_counter()
    set_up_logging(verbose)
    job = load_job(job_file, [*(overrides or []), *([f"simulation.engine='{engine}'"] if engine else [])])
    console = console_for(quiet, json_output)
    with loading(console):
        from fedplat.cli.preflight import prepare
        from simulations.choose import settle_engine
        from simulations.simulate import simulate as run_simulation

        job, choice = settle_engine(prepare(job))
    console.print(f"engine [bold]{choice.engine}[/]: {choice.reason}", highlight=False)
    run = RunDirectory.create(out or new_run_path(job), job)
    _run(
        job,
        run,
        lambda listeners: run_simulation(job, run, listeners),
        console,
        json_output,
        tensorboard,
        started,
    )


def resume(
    run_reference: RunReference,
    json_output: Json = False,
    tensorboard: TensorBoard = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    kit: Annotated[
        Path | None, typer.Option("--kit", help="Your operator kit: continue a run of the consortium's server.")
    ] = None,
) -> None:
    """Continue a run that was stopped, from its last committed round.

    The final model equals, bit for bit, that of a run that was never stopped.

    Examples:

    - `fedplat resume latest`

    - `fedplat resume latest --kit kits/operators/alice`  (a run across sites)

    - `fedplat resume runs/digits-demo-20261118-101500-ab12`
    """
    started = time.perf_counter()
    set_up_logging(verbose)
    if kit is not None:
        from fedplat.cli.operator import resume_submitted

        resume_submitted(run_reference, kit, console_for(quiet, json_output), json_output)
        return
    run = find_run(run_reference)
    job = run.job()
    console = console_for(quiet, json_output)
    with loading(console):
        from server_app.run import require_resumable
        from simulations.simulate import resume as resume_simulation

        require_resumable(run)
    _run(
        job,
        run,
        lambda listeners: resume_simulation(run, listeners),
        console,
        json_output,
        tensorboard,
        started,
    )


def _run(
    job: Job,
    run: RunDirectory,
    drive: Drive,
    console: "Console",
    json_output: bool,
    tensorboard: bool,
    started: float,
) -> None:
    """Drive a run with progress, then draw and report; say how to resume if it is stopped."""
    from fedplat.cli.progress import LiveProgress, PlainProgress
    from fedplat.cli.report import print_report

    console.print(
        f"[bold]{job.job.name}[/]: task {job.task.name}, {job.cohort.clients} clients, {job.cohort.cohort_size} per "
        f"round, {job.server.strategy}, {job.job.rounds} rounds → {run.path}",
        highlight=False,
    )
    listeners: list[Any] = []
    if tensorboard:
        from fedplat.tensorboard import TensorBoardWriter

        listeners.append(TensorBoardWriter(run.path / "tensorboard"))
    progress = (LiveProgress if console.is_terminal and not console.quiet else PlainProgress)(job, console)
    try:
        with terminate_like_interrupt(), progress:
            drive((progress, *listeners))
    except KeyboardInterrupt:
        typer.echo(f"\nstopped. Continue with: fedplat resume {run.path}", err=True)
        raise typer.Exit(INTERRUPTED) from None
    except JobError as error:
        raise JobError(f"{error}\nThe run is kept. Continue it with: fedplat resume {run.path}") from error
    finally:
        for writer in listeners:
            writer.close()
    summary = print_report(run, job, console)
    if json_output:
        typer.echo(json.dumps(summary.as_json(time.perf_counter() - started)))
