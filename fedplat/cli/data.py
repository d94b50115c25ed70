"""`fedplat data`: look at a partition, fetch a data set."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedplat.cli.options import JobFile, Overrides
from fedplat.errors import UsageError
from fedplat.job import load_job

if TYPE_CHECKING:
    from fedplat.federation import FederationData

app = typer.Typer(
    help="Look at how data is dealt to clients; fetch data sets.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)
SHOWN = 12


@app.command()
def show(
    job_file: JobFile = None,
    overrides: Overrides = None,
    out: Annotated[Path, typer.Option("--out", help="Picture to write.")] = Path("partition.png"),
) -> None:
    """Draw who holds which examples.

    Example: `fedplat data show --set data.partition.alpha=0.1 --out skewed.png`
    """
    job = load_job(job_file, overrides or [])
    from rich.console import Console

    console = Console()
    with console.status("partitioning …"):
        from fedplat.federation import FederationData
        from fedplat.plots import plot_partition
        from fedplat.tasks import load_task

        data = FederationData(job, load_task(job))
        title = f"{job.task.name}: {len(data.examples)} examples, {len(data.parts)} clients, {job.data.partition.kind}"
        plot_partition(data.parts, data.examples.partition_labels(), title, out)
    _print_bars(data, title)
    console.print(f"picture: {out}", highlight=False)


def _print_bars(data: "FederationData", title: str) -> None:
    """The first clients as bars in the terminal, one colour per label."""
    from rich.console import Console
    from rich.text import Text

    from fedplat.plots import label_counts

    labels = data.examples.partition_labels()
    console = Console()
    console.print(title, style="bold", highlight=False)
    sizes = [len(part) for part in data.parts]
    counts = label_counts(data.parts, labels) if labels is not None else {0: sizes}
    scale = 60 / max(sizes)
    for client in range(min(SHOWN, len(sizes))):
        bar = Text(f"client-{client:<5} {sizes[client]:>6} ")
        for label, per_client in counts.items():
            bar.append("█" * round(per_client[client] * scale), style=f"color({1 + label % 14})")
        console.print(bar)
    if len(sizes) > SHOWN:
        console.print(f"… {len(sizes) - SHOWN} more", style="dim", highlight=False)
    middle = sorted(sizes)[len(sizes) // 2]
    console.print(f"examples per client: least {min(sizes)}, median {middle}, most {max(sizes)}", highlight=False)


@app.command()
def download(
    task: Annotated[str, typer.Argument(help="Task whose files to fetch; only mnist needs any.")] = "mnist",
    folder: Annotated[Path, typer.Option("--dir", help="Where to put them.")] = Path("data"),
) -> None:
    """Fetch a data set with its checksums verified (needs a network).

    Example: `fedplat data download mnist --dir data`
    """
    if task != "mnist":
        raise UsageError(f"task '{task}' has nothing to download; only mnist does")
    from rich.progress import Progress

    from fedplat.tasks.mnist import download as fetch

    with Progress() as progress:
        bar = progress.add_task("mnist", total=1.0)
        fetch(folder, lambda name, share: progress.update(bar, completed=share, description=name))
    typer.echo(f"MNIST is in {folder}. Use it with: fedplat simulate --set task.name=mnist --set data.dir={folder}")
