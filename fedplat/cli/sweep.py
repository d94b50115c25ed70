"""`fedplat sweep`: one job, many settings, several seeds; one table and one picture."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedplat.cli.options import Engine, JobFile, Json, Overrides, Quiet, Verbose, set_up_logging
from fedplat.cli.terminal import INTERRUPTED, console_for, loading, terminate_like_interrupt
from fedplat.errors import JobError, UsageError
from fedplat.job import load_job
from fedplat.rundir import new_run_path

if TYPE_CHECKING:
    from rich.console import Console

    from simulations.sweep_plan import Point, SweepSpec
    from simulations.sweep_results import Row

SHOWN = 20
GridOption = Annotated[
    list[str] | None,
    typer.Option("--grid", metavar="SECTION.KEY=A,B,…", help="Values for a key of the job; repeatable."),
]
Seeds = Annotated[
    int | None, typer.Option("--seeds", min=1, help="Runs per setting, seeded job.seed, job.seed + 1, …; default: 1.")
]
Out = Annotated[Path | None, typer.Option("--out", help="Directory of the sweep; default: sweeps/ID.")]
Resume = Annotated[Path | None, typer.Option("--resume", metavar="DIR", help="Continue the sweep in this directory.")]


def sweep(
    job_file: JobFile = None,
    grid: GridOption = None,
    seeds: Seeds = None,
    overrides: Overrides = None,
    engine: Engine = None,
    out: Out = None,
    resume: Resume = None,
    json_output: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Run a job over a grid of settings and seeds, and compare.

    Every point is checked before the first one runs. A stopped sweep continues where it was.

    Examples:

    - `fedplat sweep job.toml --grid local.lr=0.01,0.1 --grid cohort.fraction=0.1,0.5 --seeds 3`

    - `fedplat sweep --grid "data.partition={kind='iid'},{kind='shards'}" --set job.rounds=20 --out sweeps/skew`

    - `fedplat sweep --grid "server={strategy='FedAvg'},{strategy='FedAdam',args={eta=0.05}}"`  (keys vary together)

    - `fedplat sweep --resume sweeps/skew`
    """
    set_up_logging(verbose)
    if resume is not None and (job_file or grid or seeds or overrides or engine or out):
        raise UsageError(f"--resume {resume} takes everything from that sweep: leave the other arguments out")
    from simulations.sweep import read_spec
    from simulations.sweep_plan import plan_points

    if resume is not None:
        folder, spec = resume, read_spec(resume)
    else:
        engines = [f"simulation.engine='{engine}'"] if engine else []
        folder, spec = _new_sweep(job_file, grid or [], seeds or 1, [*(overrides or []), *engines], out)
    points = plan_points(spec)
    console = console_for(quiet, json_output)
    _run(folder, spec, _checked(points, console), console, json_output)


def _new_sweep(
    job_file: Path | None, grid: list[str], seeds: int, overrides: list[str], out: Path | None
) -> "tuple[Path, SweepSpec]":
    from simulations.sweep_plan import SweepSpec, given_keys

    job = load_job(job_file, overrides)
    return out or new_run_path(job, Path("sweeps")), SweepSpec(given_keys(job), tuple(grid), seeds)


def _checked(points: "tuple[Point, ...]", console: "Console") -> "tuple[Point, ...]":
    with loading(console):
        from fedplat.cli.preflight import prepare
        from simulations.sweep_plan import check_points
    with console.status("checking …") as status:
        return check_points(
            points, prepare, lambda point: status.update(f"checking {len(points)} points … {point.name}")
        )


def _run(folder: Path, spec: "SweepSpec", points: "tuple[Point, ...]", console: "Console", json_output: bool) -> None:
    """Drive the sweep with progress, then compare; say how to go on if it is stopped or points failed."""
    from fedplat.cli.sweep_progress import LiveSweep, PlainSweep
    from simulations.sweep import open_sweep, run_points
    from simulations.sweep_results import as_json, collect, write_results

    open_sweep(folder, spec, points)
    settings = len({point.setting for point in points})
    console.print(f"[bold]sweep[/]  {settings} settings × {spec.seeds} seeds → {folder}", highlight=False)
    if any(point.job.privacy is not None for point in points):
        console.print(
            f"[bold]privacy[/]  each run's ε is for that run alone: choosing among {len(points)} costs more, up to all "
            "their releases together",
            highlight=False,
        )
    progress = (LiveSweep if console.is_terminal and not console.quiet else PlainSweep)(len(points), console)
    try:
        with terminate_like_interrupt(), progress:
            failures = run_points(folder, points, progress)
    except KeyboardInterrupt:
        typer.echo(
            f"\nstopped after {progress.done} of {len(points)} runs. Continue with: fedplat sweep --resume {folder}\n"
            f"or with the same command and --out {folder}",
            err=True,
        )
        raise typer.Exit(INTERRUPTED) from None
    rows = collect(folder, points)
    with console.status("drawing …"):
        write_results(folder, rows)
    _print_results(folder, rows, console)
    if json_output:
        typer.echo(json.dumps(as_json(folder, rows)))
    if failures:
        reasons = "\n".join(f"  {name}: {reason}" for name, reason in failures.items())
        raise JobError(
            f"{len(failures)} of {len(points)} runs failed:\n{reasons}\n"
            f"The others are compared. Try these again with: fedplat sweep --resume {folder}"
        )


def _print_results(folder: Path, rows: "list[Row]", console: "Console") -> None:
    from rich.table import Table

    from simulations.sweep_plan import value_text

    metric = rows[0].metric
    table = Table(box=None, padding=(0, 2, 0, 0))
    scores = list(dict.fromkeys((metric, "loss")))
    for column in rows[0].values or ["setting"]:
        table.add_column(column, overflow="fold")
    for column in ("runs", *scores, "best", "rounds", "seconds"):
        table.add_column(column, no_wrap=True)
    for row in rows[:SHOWN]:
        settings = [value_text(value) for value in row.values.values()] or [row.name]
        finals = [str(final) if (final := row.final(name)) else "–" for name in scores]
        best = "–" if row.best is None else f"{row.best:.4f}"
        costs = [
            f"{spread.mean:.{digits}f}" if spread else "–" for spread, digits in ((row.rounds, 0), (row.seconds, 1))
        ]
        table.add_row(*settings, f"{len(row.finished)}/{len(row.runs)}", *finals, best, *costs)
    console.print(table)
    if len(rows) > SHOWN:
        console.print(f"… and {len(rows) - SHOWN} more in results.csv", highlight=False)
    console.print(
        f"[bold]sweep[/]    {folder}   (sweep.toml, results.csv, results.json)\n"
        f"[bold]picture[/]  {folder / 'comparison.png'}\n"
        f"[bold]next[/]     fedplat runs show {rows[0].runs[0].run}\n"
        f"         fedplat runs list --dir {folder}",
        highlight=False,
        soft_wrap=True,
    )
