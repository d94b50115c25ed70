"""The command tree."""

from typing import Annotated

import typer

from fedplat import __version__
from fedplat.cli import budget, data, federation, job, operator, privacy, runs, server, simulate, site_service, sweep

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
site = typer.Typer(no_args_is_help=True, help="Run a site of a consortium.", rich_markup_mode="markdown")
site.command("start")(site_service.start)
site.command("audit")(site_service.audit)
site.command("agent", hidden=True)(site_service.agent)
site.command("link", hidden=True)(site_service.link)
app.add_typer(site, name="site")
app.add_typer(server.app, name="server")
app.command("submit")(operator.submit)
app.command("status")(operator.status)
app.command("logs")(operator.logs)
app.command("stop")(operator.stop)
app.command("sites")(operator.sites)
app.add_typer(federation.app, name="federation")


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
