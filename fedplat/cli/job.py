"""`fedplat job`: write, check and explain job files."""

import json
from pathlib import Path
from typing import Annotated

import typer

from fedplat.cli.options import JobFile, Overrides
from fedplat.errors import UsageError
from fedplat.job import Job, load_job

app = typer.Typer(help="Write, check and explain job files.", no_args_is_help=True, rich_markup_mode="markdown")


@app.command()
def init(
    path: Annotated[Path, typer.Argument(help="File to write.")] = Path("job.toml"),
    overrides: Overrides = None,
) -> None:
    """Write a commented job file with every key and its default.

    Example: `fedplat job init hospital.toml --set task.name=cancer --set cohort.clients=5`
    """
    from fedplat.cli.job_template import commented_toml

    job = load_job(None, overrides or [])
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(commented_toml(job))
    except FileExistsError:
        raise UsageError(f"{path} exists already: choose another name or remove it") from None
    except OSError as error:
        raise UsageError(f"{path}: can't be written: {error.strerror}") from None
    typer.echo(f"wrote {path}. Check it with: fedplat job check {path}\nRun it with:        fedplat simulate {path}")


@app.command()
def check(job_file: JobFile = None, overrides: Overrides = None) -> None:
    """Check a job for real: keys, strategy, task, data, partition, model. Trains nothing.

    Example: `fedplat job check job.toml --set cohort.clients=500`
    """
    job = load_job(job_file, overrides or [])
    from fedplat.cli.preflight import prepare

    prepared = prepare(job)
    typer.echo(f"ok: {prepared.job.name}, sha256 {prepared.digest}")


@app.command()
def schema(
    events: Annotated[bool, typer.Option("--events", help="The schema of events.jsonl instead.")] = False,
) -> None:
    """Print the JSON schema of the job file (every key, its meaning, its limits)."""
    from fedplat.events import EVENT

    typer.echo(json.dumps(EVENT.json_schema() if events else Job.model_json_schema(), indent=2))


@app.command("run-config")
def run_config(job_file: JobFile = None, overrides: Overrides = None) -> None:
    """Print a job as a Flower run config: one declared key that holds the whole job as canonical JSON.

    A private job's noise is solved here and written into it: sites don't solve, they are told what they agree to.

    Example: `fedplat job run-config job.toml > run.toml && flwr run . --run-config run.toml`
    """
    import tomli_w

    from fedplat.wire import JOB_KEY

    job = _with_noise(load_job(job_file, overrides or []))
    typer.echo(tomli_w.dumps({JOB_KEY: job.canonical()}), nl=False)


def _with_noise(job: Job) -> Job:
    if job.privacy is None:
        return job
    from privacy.plan import expected_delta_warning, plan_privacy

    plan = plan_privacy(job)
    assert plan is not None
    warning = expected_delta_warning(job)
    if warning is not None:
        typer.echo(f"warning: privacy.{warning}", err=True)
    pinned = plan.section.model_copy(update={"noise_multiplier": plan.noise_multiplier})
    return job.model_copy(update={"privacy": pinned})
