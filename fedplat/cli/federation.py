"""`fedplat federation demo`: a whole consortium on this machine, in one command."""

import json
import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedplat.cli.options import JobFile, Json, Overrides, Quiet, Verbose, set_up_logging
from fedplat.cli.terminal import console_for, loading, terminate_like_interrupt
from fedplat.errors import JobError
from fedplat.job import Job, load_job

if TYPE_CHECKING:
    from rich.console import Console

    from simulations.local_federation import LocalFederation

app = typer.Typer(no_args_is_help=True, help="Federations of real processes.", rich_markup_mode="markdown")
Sites = Annotated[int, typer.Option("--sites", min=1, max=16, help="How many sites.")]
Keep = Annotated[
    Path | None, typer.Option("--keep", help="Make kits, logs and the run here and keep them; default: clean up.")
]
DEMO = ("job.name='federation-demo'", "job.rounds=5", "cohort.fraction=1.0", "cohort.deadline_s=120.0")


@app.command()
def demo(
    job_file: JobFile = None,
    overrides: Overrides = None,
    sites: Sites = 3,
    keep: Keep = None,
    json_output: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Provision a server and sites on this machine, run a real job over TLS, show it, clean up.

    `fedplat simulate` with the same settings gives the same model, bit for bit.

    Examples:

    - `fedplat federation demo`

    - `fedplat federation demo --sites 5 --set job.rounds=10 --json`

    - `fedplat federation demo --keep /tmp/consortium`  (then look around)
    """
    started = time.perf_counter()
    set_up_logging(verbose)
    console = console_for(quiet, json_output)
    base = () if job_file is not None else DEMO
    job = load_job(job_file, [*base, f"cohort.clients={sites}", *(overrides or [])])
    folder = keep or Path(tempfile.mkdtemp(prefix="fedplat-demo-"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with terminate_like_interrupt():
            result = _demonstrate(job, folder, console)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    except JobError as error:
        raise JobError(f"{error}\nRun it with --keep DIR to keep the logs") from None
    finally:
        if keep is None:
            shutil.rmtree(folder, ignore_errors=True)
    result["wall_s"] = round(time.perf_counter() - started, 2)
    if json_output:
        typer.echo(json.dumps(result))


def _demonstrate(job: Job, folder: Path, console: "Console") -> dict[str, Any]:
    with loading(console):
        from simulations.local_federation import LocalFederation
        from simulations.private_job import with_privacy_pinned

        job = with_privacy_pinned(job)
        unit = job.privacy.unit if job.privacy is not None else "sample"
        federation = LocalFederation(folder, job.cohort.clients, tasks=(job.task.name,), unit=unit)
    console.print(f"provisioned: server, {', '.join(federation.names)}, operator → {federation.kits}", highlight=False)
    with federation, console.status("starting SuperLink, front, SuperNodes and agents …") as status:
        federation.wait_until_online(tick=lambda text: status.update(f"starting … {text}"))
        status.stop()
        console.print(f"connected over mutual TLS: {', '.join(federation.names)}", highlight=False)
        return _submit_and_follow(federation, job, console)


def _submit_and_follow(federation: "LocalFederation", job: Job, console: "Console") -> dict[str, Any]:
    from fedplat.cli.operator import ready_for_sites, sign
    from fedplat.cli.report import draw_plots, result_table
    from fedplat.cli.watch import follow_run
    from fedplat.rundir import list_runs
    from fedplat.summary import summarise

    job = ready_for_sites(job, federation.operator)
    with federation.control() as control:
        run_id = control.start_run(sign(job, federation.operator))
        follow_run(control, run_id, job, console)
    (run,) = list_runs(federation.server.runs_folder)
    summary = summarise(run)
    draw_plots(run, job, summary)
    console.print(result_table(summary, job.evaluation.metric))
    console.print(f"[bold]run[/]    {run.path}", highlight=False)
    return {
        "run": run.id,
        "rounds": summary.rounds,
        "sites": federation.names,
        f"test_{job.evaluation.metric}": summary.final(job.evaluation.metric),
        "test_accuracy": summary.final("accuracy"),
        "model_sha256": summary.model_sha256,
        "job": job.digest,
    }
