"""`fedplat submit`, `status`, `logs`, `stop`, `sites`: an operator at work, over TLS with the kit's certificate."""

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedplat.cli.options import Json, Overrides, Quiet
from fedplat.cli.terminal import console_for, loading, plain
from fedplat.errors import JobError, UsageError
from fedplat.job import Job, load_job

if TYPE_CHECKING:
    from rich.console import Console

    from fedplat.consortium.kit_files import OperatorKit
    from fedplat.flower.control import Control, RunStatus

KitOption = Annotated[
    Path, typer.Option("--kit", envvar="FEDPLAT_KIT", help="Your operator kit; default: $FEDPLAT_KIT or this folder.")
]
SubmittedJob = Annotated[Path, typer.Argument(metavar="JOB.TOML", help="The job, as it was simulated.")]
RunId = Annotated[str, typer.Argument(metavar="RUN", help="Run id as `fedplat status` shows it, or 'latest'.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only ask every site whether it would accept the job.")]
Follow = Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run ends.")]


def submit(
    job_file: SubmittedJob,
    overrides: Overrides = None,
    kit: KitOption = Path(),
    dry_run: DryRun = False,
    follow: Follow = False,
    json_output: Json = False,
    quiet: Quiet = False,
) -> None:
    """Sign a job and start it on the consortium's sites.

    Examples:

    - `fedplat submit job.toml --kit kits/operators/alice --dry-run`

    - `fedplat submit job.toml --follow`
    """
    console = console_for(quiet, json_output)
    job = load_job(job_file, overrides or [])
    with loading(console):
        from server_app.executor import CONSIDER

        operator, control = connect(kit)
        job = ready_for_sites(job, operator)
        signed = sign(job, operator)
        with control:
            run_id = control.start_run(signed, CONSIDER if dry_run else "")
    with control_again(operator) as control:
        if dry_run:
            accepted = _consider(control, run_id, console, json_output)
            raise typer.Exit(0 if accepted else 1)
        console.print(f"run [bold]{run_id}[/] of {job.job.name} on {', '.join(job.cohort.sites)}", highlight=False)
        if follow:
            from fedplat.cli.watch import follow_run

            follow_run(control, run_id, job, console)
        else:
            console.print(f"watch it with: fedplat logs {run_id} -f --kit {kit}", highlight=False)
    if json_output:
        typer.echo(json.dumps({"run": str(run_id), "job": job.digest, "sites": list(job.cohort.sites)}))


def status(
    run: Annotated[str, typer.Argument(metavar="[RUN]", help="One run; default: all.")] = "",
    kit: KitOption = Path(),
    json_output: Json = False,
) -> None:
    """Show the server's runs, newest last.

    Examples:

    - `fedplat status --kit kits/operators/alice`
    """
    from fedplat.cli.watch import progress_of, status_table

    _, control = connect(kit)
    with control:
        found = [_find(control, run)] if run else control.runs()
        rows = [progress_of(control, one) for one in found]
    if json_output:
        typer.echo(json.dumps(rows))
        return
    console_for(False, False).print(status_table(rows))


def logs(run: RunId = "latest", follow: Follow = False, kit: KitOption = Path()) -> None:
    """Print a run's log.

    Examples:

    - `fedplat logs latest -f --kit kits/operators/alice`
    """
    from fedplat.cli.watch import print_logs

    _, control = connect(kit)
    with control:
        print_logs(control, _find(control, run), follow)


def stop(run: RunId, kit: KitOption = Path(), json_output: Json = False) -> None:
    """Stop a run. What was committed stays; `fedplat resume RUN --kit KIT` goes on with it.

    Examples:

    - `fedplat stop latest --kit kits/operators/alice`
    """
    _, control = connect(kit)
    with control:
        found = _find(control, run)
        if not control.stop_run(found.run_id):
            raise JobError(f"{found.run_id}: is {found.status}, there is nothing to stop")
    typer.echo(json.dumps({"run": str(found.run_id), "stopped": True}) if json_output else f"stopped {found.run_id}")


def resume_submitted(run: str, kit: Path, console: "Console", json_output: bool) -> None:
    """Start a new Flower run that goes on with the run directory of an old one."""
    from fedplat.cli.watch import directory_of
    from fedplat.consortium.signed_job import SignedJob
    from server_app.executor import RESUME

    operator, control = connect(kit)
    with control:
        found = _find(control, run)
        directory = directory_of(control, found)
        if directory is None:
            raise UsageError(f"{found.run_id}: never began, so there is nothing to resume. Submit the job again")
        job = Job.from_canonical(SignedJob.parse(found.job).job)
        run_id = control.start_run(sign(job, operator), f"{RESUME}{directory}")
    console.print(f"run [bold]{run_id}[/] goes on with {plain(directory)}", highlight=False)
    if json_output:
        typer.echo(json.dumps({"run": str(run_id), "directory": directory}))


def sites(kit: KitOption = Path(), json_output: Json = False) -> None:
    """Show who is connected, and what is left of budgets where sites show it.

    Examples:

    - `fedplat sites --kit kits/operators/alice`
    """
    from fedplat.cli.watch import budgets_shown, sites_table

    operator, control = connect(kit)
    with control:
        nodes = {node.name: node for node in control.nodes() if node.status != "unregistered"}
        budgets = budgets_shown(control)
    rows = []
    for name in operator.load_roster().sites:
        node = nodes.get(name)
        seen = None if node is None or not node.online_until else node.online_until - 60.0
        rows.append(
            {
                "site": name,
                "status": "unknown" if node is None else node.status,
                "last_heartbeat": seen,
                "budget_left": budgets.get(name),
            }
        )
    if json_output:
        typer.echo(json.dumps(rows))
        return
    console_for(False, False).print(sites_table(rows))


# --- shared -------------------------------------------------------------------------------------


def connect(kit: Path) -> "tuple[OperatorKit, Control]":
    from fedplat.consortium.kit_files import OperatorKit

    operator = OperatorKit.load(kit)
    return operator, control_again(operator)


def control_again(operator: "OperatorKit") -> "Control":
    from fedplat.flower.control import Control, Credentials

    return Control(operator.server, Credentials(operator.certificate, operator.key, operator.ca).context())


def ready_for_sites(job: Job, operator: "OperatorKit") -> Job:
    """The job as sites take it: which site is which client, and the noise written out."""
    from simulations.private_job import with_privacy_pinned

    known = list(operator.load_roster().sites)
    if not job.cohort.sites:
        if job.cohort.clients != len(known):
            raise UsageError(
                f"cohort.clients is {job.cohort.clients}, the consortium has {len(known)} sites ({', '.join(known)}). "
                f"Say which take part with cohort.sites, or: --set cohort.clients={len(known)}"
            )
        job = job.model_copy(update={"cohort": job.cohort.model_copy(update={"sites": tuple(known)})})
    from server_app.executor import require_drivable

    require_drivable(job, (job.server.strategy,), known)
    return with_privacy_pinned(job)


def sign(job: Job, operator: "OperatorKit") -> str:
    from fedplat.consortium.signed_job import SignedJob

    return SignedJob.sign(job, operator.consortium, operator.name, operator.signing_key(), time.time()).text()


def _find(control: "Control", reference: str) -> "RunStatus":
    found = control.runs()
    if not found:
        raise UsageError("the server has no runs yet. Submit one with: fedplat submit job.toml")
    if reference == "latest":
        return found[-1]
    matches = [run for run in found if str(run.run_id).startswith(reference)]
    if len(matches) != 1:
        raise UsageError(f"{reference}: {'several runs begin with this' if matches else 'no such run'}: fedplat status")
    return matches[0]


def _consider(control: "Control", run_id: int, console: "Console", json_output: bool) -> bool:
    from fedplat.cli.watch import considered

    answers = considered(control, run_id)
    for site, answer in answers.items():
        console.print(f"[bold]{plain(site)}[/]: {plain(answer)}", highlight=False)
    if json_output:
        typer.echo(json.dumps({"considered": answers}))
    return all(answer == "accepts" for answer in answers.values())
