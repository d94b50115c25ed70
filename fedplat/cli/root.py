"""The command tree."""

from typing import Annotated

import typer

from fedplat import __version__
from fedplat.cli import (
    budget,
    data,
    doctor,
    federation,
    job,
    operator,
    privacy,
    provision,
    runs,
    server,
    simulate,
    site,
    site_service,
    sweep,
)

app = typer.Typer(
    name="fedplat",
    help="Train one model across sites that never share their data.",
    epilog="Start here:  fedplat simulate      then:  fedplat job init my-job.toml",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
TRAIN, FEDERATE, PROTECT = "Simulate", "Run across sites", "Account for privacy"
app.command("simulate", rich_help_panel=TRAIN)(simulate.simulate)
app.command("resume", rich_help_panel=TRAIN)(simulate.resume)
app.command("sweep", rich_help_panel=TRAIN)(sweep.sweep)
app.add_typer(job.app, name="job", rich_help_panel=TRAIN)
app.add_typer(data.app, name="data", rich_help_panel=TRAIN)
app.add_typer(runs.app, name="runs", rich_help_panel=TRAIN)

app.add_typer(federation.app, name="federation", rich_help_panel=FEDERATE)
app.command("provision", rich_help_panel=FEDERATE)(provision.provision)
app.command("doctor", rich_help_panel=FEDERATE)(doctor.doctor)
site.app.command("start")(site_service.start)
site.app.command("audit")(site_service.audit)
site.app.command("agent", hidden=True)(site_service.agent)
site.app.command("link", hidden=True)(site_service.link)
app.add_typer(site.app, name="site", rich_help_panel=FEDERATE)
app.add_typer(server.app, name="server", rich_help_panel=FEDERATE)
app.command("submit", rich_help_panel=FEDERATE)(operator.submit)
app.command("status", rich_help_panel=FEDERATE)(operator.status)
app.command("logs", rich_help_panel=FEDERATE)(operator.logs)
app.command("stop", rich_help_panel=FEDERATE)(operator.stop)
app.command("sites", rich_help_panel=FEDERATE)(operator.sites)

app.add_typer(privacy.app, name="privacy", rich_help_panel=PROTECT)
app.command("budget", rich_help_panel=PROTECT)(budget.budget)


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
