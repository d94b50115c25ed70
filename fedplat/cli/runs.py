"""`fedplat runs`: list, show, compare and plot what was run."""

import json
from pathlib import Path
from typing import Annotated

import typer

from fedplat.cli.options import Json, RunReference, RunReferences
from fedplat.errors import UsageError
from fedplat.rundir import RunDirectory, find_run, list_runs, runs_root
from fedplat.summary import Summary, summarise, summarise_clients

app = typer.Typer(help="List, show, compare and plot runs.", no_args_is_help=True, rich_markup_mode="markdown")
Folder = Annotated[Path | None, typer.Option("--dir", help="Folder of runs; default: $FEDPLAT_RUNS, else ./runs.")]


@app.command("list")
def list_command(folder: Folder = None, json_output: Json = False) -> None:
    """One line per run, oldest first."""
    summaries = [_summary_or_corrupted(run) for run in list_runs(folder) if run.events_file.exists()]
    if json_output:
        typer.echo(json.dumps([_row(summary) for summary in summaries]))
    elif not summaries:
        typer.echo(f"no runs in {folder or runs_root()}. Make one with: fedplat simulate")
    else:
        _print_table(summaries)


@app.command()
def show(
    run_reference: RunReference,
    clients: Annotated[bool, typer.Option("--clients", help="One line per client.")] = False,
    json_output: Json = False,
) -> None:
    """The result of one run, its last rounds, and with --clients every client.

    Example: `fedplat runs show latest --clients`
    """
    from rich.console import Console

    from fedplat.cli.report import result_table

    run = find_run(run_reference)
    summary = summarise(run)
    if json_output:
        typer.echo(json.dumps(_row(summary)))
        return
    console = Console()
    console.print(f"[bold]{run.path}[/]  {summary.status}", highlight=False)
    console.print(result_table(summary, run.job().evaluation.metric))
    console.print(_clients_table(run_reference) if clients else _rounds_table(summary))
    if summary.status != "finished":
        console.print(f"continue with: fedplat resume {run.path}", highlight=False)


@app.command()
def compare(
    run_references: RunReferences,
    out: Annotated[Path, typer.Option("--out", help="Picture to write.")] = Path("comparison.png"),
) -> None:
    """Several runs side by side: a table, the keys in which their jobs differ, and a picture.

    Example: `fedplat runs compare digits-demo-20261118 latest`
    """
    from rich.console import Console

    from fedplat.plots import plot_comparison

    runs = [find_run(reference) for reference in run_references]
    summaries = [summarise(run) for run in runs]
    _print_table(summaries)
    console = Console()
    flat = [_flatten(run.job().model_dump(mode="json")) for run in runs]
    for key in sorted({key for job in flat for key in job}):
        values = [job.get(key) for job in flat]
        if any(value != values[0] for value in values):
            console.print(f"  {key}: {'  |  '.join(str(value) for value in values)}", highlight=False)
    plot_comparison(summaries, runs[0].job().evaluation.metric, out)
    console.print(f"picture: {out}", highlight=False)


@app.command()
def plot(run_reference: RunReference) -> None:
    """Draw a run's plots again, from its events (also while it is running).

    Example: `fedplat runs plot latest`
    """
    from fedplat.cli.report import draw_plots

    run = find_run(run_reference)
    draw_plots(run, run.job(), summarise(run))
    for picture in sorted(run.plots.glob("*.png")):
        typer.echo(picture)


@app.command()
def tensorboard(run_reference: RunReference) -> None:
    """Write a run's events as TensorBoard files.

    Example: `fedplat runs tensorboard latest && tensorboard --logdir runs`
    """
    from fedplat.tensorboard import export_run

    run = find_run(run_reference)
    export_run(run, run.path / "tensorboard")
    typer.echo(f"look at it with: tensorboard --logdir {run.path / 'tensorboard'}")


def _summary_or_corrupted(run: RunDirectory) -> Summary:
    """One damaged run must not hide the others."""
    try:
        return summarise(run)
    except UsageError:
        return Summary(run=str(run.path), status="corrupted")


def _row(summary: Summary) -> dict[str, object]:
    return {"status": summary.status, **summary.as_json(summary.training_s)}


def _print_table(summaries: list[Summary]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("run", "status", "rounds", "clients", "accuracy", "loss", "clients/s", "MB up"):
        table.add_column(column, overflow="fold")
    for s in summaries:
        final, where = (s.final, "") if s.server else (s.final_on_clients, " (clients)")
        scores = [f"{v:.4f}{where}" if (v := final(name)) is not None else "–" for name in ("accuracy", "loss")]
        progress = f"{s.rounds}/{s.planned_rounds}"
        speed, traffic = f"{s.clients_per_s:.0f}", f"{s.bytes_up / 1e6:.1f}"
        table.add_row(Path(s.run).name, s.status, progress, str(s.clients), *scores, speed, traffic)
    Console().print(table)


def _rounds_table(summary: Summary, last: int = 10) -> "object":
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0))
    where = "test" if summary.server else "clients'"
    measured = summary.server or summary.on_clients
    metrics = sorted({name for values in measured.values() for name in values})
    for column in ("round", "train loss", *(f"{where} {name}" for name in metrics)):
        table.add_column(column)
    for number in sorted(measured)[-last:]:
        train = summary.train.get(number, {}).get("loss")
        scores = [f"{measured[number][name]:.4f}" for name in metrics]
        table.add_row(str(number), f"{train:.4f}" if train is not None else "–", *scores)
    return table


def _clients_table(run_reference: str) -> "object":
    from rich.table import Table

    from fedplat.federation import natural_order

    clients = summarise_clients(find_run(run_reference))
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("client", "examples", "rounds", "last loss", "mean update norm"):
        table.add_column(column)
    for name in natural_order(list(clients)):
        client = clients[name]
        norm = sum(client.norms) / len(client.norms)
        table.add_row(
            name, str(client.num_examples), str(len(client.rounds)), f"{client.losses[-1]:.4f}", f"{norm:.3f}"
        )
    return table


def _flatten(table: dict[str, object], prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, value in table.items():
        flat |= _flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat
