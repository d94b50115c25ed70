"""The command tree."""

from typing import Annotated

import typer

from fedplat import __version__
from fedplat.cli import budget, data, doctor, job, privacy, provision, runs, simulate, site, sweep

app = typer.Typer(
    name="fedplat",
    help="Train one model across sites that never share their data.",
    epilog="Start here:  fedplat simulate      then:  fedplat job init my-job.toml",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("simulate")(simulate.simulate)
app.command("resume")(simulate.resume)
app.command("sweep")(sweep.sweep)
app.add_typer(job.app, name="job")
app.add_typer(data.app, name="data")
app.add_typer(runs.app, name="runs")
app.add_typer(privacy.app, name="privacy")
app.command("budget")(budget.budget)
app.command("provision")(provision.provision)
app.command("doctor")(doctor.doctor)
app.add_typer(site.app, name="site")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fedplat {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Train one model across sites that never share their data."""
