"""Watching a run from afar: its events come as lines of its log, and look as they do in a simulation."""

import contextlib
import json
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import typer

from fedplat.cli.terminal import one_line
from fedplat.errors import JobError, UsageError
from fedplat.events import EVENT, Checkpointed, ClientFailed, Evaluated, Event, RoundFinished, RunFailed, RunFinished
from fedplat.job import Job

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from fedplat.flower.control import Control, RunStatus

RUNNING = ("pending", "starting", "running")
ASK_AGAIN_S = 1.0
PATIENCE_S = 120.0


def lines_of(control: "Control", run_id: int, follow: bool) -> Iterator[str]:
    """Complete lines of a run's log; with `follow` until the run ends, over broken connections too."""
    after, rest, lost_at = 0.0, "", None
    while True:
        run: RunStatus | None = None
        try:
            run = _the_run(control, run_id)
            if run.status not in ("pending", "starting"):
                for text, read_until in control.logs(run_id, after):
                    after, rest = read_until, rest + text
                    *whole, rest = rest.split("\n")
                    yield from whole
                    if not follow and run.status in RUNNING:
                        return
            lost_at = None
        except JobError:
            lost_at = lost_at or time.monotonic()
            if (run is None and not follow) or time.monotonic() - lost_at > PATIENCE_S:
                raise
        if not follow or (lost_at is None and run is not None and run.status not in RUNNING):
            return
        time.sleep(ASK_AGAIN_S)


def _the_run(control: "Control", run_id: int) -> "RunStatus":
    found = control.runs(run_id)
    if not found:
        raise UsageError(f"the server knows no run {run_id}. List them with: fedplat status")
    return found[0]


def event_of(line: str) -> Event | None:
    try:
        return EVENT.validate_python(json.loads(line))
    except ValueError:
        return None


def follow_run(control: "Control", run_id: int, job: Job, console: "Console") -> Event | None:
    """Show progress until the run ends; raises if it failed. Returns its last event."""
    from fedplat.cli.progress import LiveProgress, PlainProgress

    progress = (LiveProgress if console.is_terminal and not console.quiet else PlainProgress)(job, console)
    last: Event | None = None
    failure, directory = "", ""
    current: int | None = run_id
    with progress:
        while current is not None:
            for line in lines_of(control, current, follow=True):
                event = event_of(line)
                if event is not None:
                    last = event
                    progress(event)
                elif line.startswith("error: "):
                    failure = line.removeprefix("error: ")
                elif line.startswith("run "):
                    directory = line.removeprefix("run ").strip()
            run = _the_run(control, current)
            lost = run.status == "finished:failed" and not failure and not isinstance(last, RunFinished)
            current = _continuation(control, directory, current) if lost and directory else None
    if isinstance(last, RunFinished):
        console.print(f"finished after round {last.round} ({last.reason}); model sha256 {last.model_sha256}")
        return last
    raise JobError(f"run {run_id} {run.status}: {failure or run.details or 'see fedplat logs'}")


def _continuation(control: "Control", directory: str, before: int) -> int | None:
    """The Flower run in which the server goes on with a run directory after it lost the one before."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        with contextlib.suppress(JobError):  # it may still be away
            runs = control.runs()
            known = [run.run_id for run in runs]
            later = runs[known.index(before) + 1 :] if before in known else runs
            for run in reversed(later):
                if run.action == f"resume:{directory}":
                    return run.run_id
        time.sleep(ASK_AGAIN_S)
    return None


def print_logs(control: "Control", run: "RunStatus", follow: bool) -> None:
    for line in lines_of(control, run.run_id, follow):
        event = event_of(line)
        typer.echo(one_line(line if event is None else _sentence(event)))


def _sentence(event: Event) -> str:
    when = time.strftime("%H:%M:%S", time.localtime(event.time))
    match event:
        case RoundFinished():
            text = f"round {event.round}: {event.accepted} updates in {event.seconds:.1f} s"
            missing = event.failed + event.late + event.refused
            text += f", {event.failed} failed, {event.late} late, {event.refused} refused" * (missing > 0)
        case Evaluated():
            text = f"round {event.round}: " + ", ".join(f"{name} {value:.4f}" for name, value in event.metrics.items())
        case ClientFailed():
            text = f"round {event.round}: {event.client} {event.kind}: {event.reason}"
        case RunFinished():
            text = f"finished after round {event.round} ({event.reason}), model sha256 {event.model_sha256}"
        case RunFailed():
            text = f"failed after round {event.round}: {event.reason}"
        case Checkpointed():
            text = f"round {event.round}: committed"
        case _:
            text = event.event.replace("_", " ")
    return f"{when}  {text}"


def directory_of(control: "Control", run: "RunStatus") -> str | None:
    """The server's run directory of a Flower run: the first line of its log."""
    for line in lines_of(control, run.run_id, follow=False):
        if line.startswith("run "):
            return line.removeprefix("run ").strip()
    return None


def progress_of(control: "Control", run: "RunStatus") -> dict[str, Any]:
    """One run in a row."""
    from fedplat.consortium.signed_job import SignedJob

    row: dict[str, Any] = {"run": str(run.run_id), "status": run.status, "job": "", "round": 0, "rounds": 0}
    row |= {"directory": None, "metrics": {}, "details": run.details}
    try:
        job = Job.from_canonical(SignedJob.parse(run.job).job)
        row |= {"job": job.job.name, "rounds": job.job.rounds}
    except Exception:  # somebody's run that carries no job of ours
        return row
    for line in lines_of(control, run.run_id, follow=False):
        event = event_of(line)
        if line.startswith("run "):
            row["directory"] = line.removeprefix("run ").strip()
        if isinstance(event, RoundFinished):
            row["round"] = event.round
        if isinstance(event, Evaluated):
            row["metrics"] = event.metrics
    return row


def considered(control: "Control", run_id: int) -> dict[str, str]:
    """The sites' answers to a dry run."""
    deadline = time.monotonic() + PATIENCE_S
    while _the_run(control, run_id).status in ("pending", "starting"):
        if time.monotonic() > deadline:
            control.stop_run(run_id)
            raise JobError("the server is busy with another run and did not get to ask the sites. Try again later")
        time.sleep(ASK_AGAIN_S)
    for line in lines_of(control, run_id, follow=True):
        if line.startswith('{"considered"'):
            return dict(json.loads(line)["considered"])
        if line.startswith("error: "):
            raise JobError(line.removeprefix("error: "))
    raise JobError(f"run {run_id}: ended without an answer; see fedplat logs {run_id}")


def budgets_shown(control: "Control") -> dict[str, dict[str, float]]:
    """What sites have shown of their budgets, as the newest runs report it."""
    for run in reversed(control.runs()):
        for line in lines_of(control, run.run_id, follow=False):
            if line.startswith('{"budgets"'):
                return dict(json.loads(line)["budgets"])
    return {}


def status_table(rows: list[dict[str, Any]]) -> "Table":
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0))
    for title in ("run", "job", "status", "round", "last measured", "directory"):
        table.add_column(title, overflow="fold")
    for row in rows:
        measured = ", ".join(f"{name} {value:.4f}" for name, value in row["metrics"].items())
        rounds = f"{row['round']}/{row['rounds']}"
        table.add_row(row["run"], row["job"], row["status"], rounds, measured, row["directory"] or "")
    return table


def sites_table(rows: list[dict[str, Any]]) -> "Table":
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0))
    for title in ("site", "status", "last heartbeat", "ε left"):
        table.add_column(title)
    for row in rows:
        ago = "" if row["last_heartbeat"] is None else f"{max(0, time.time() - row['last_heartbeat']):.0f} s ago"
        left = ", ".join(f"{account} {epsilon:.2f}" for account, epsilon in (row["budget_left"] or {}).items())
        table.add_row(row["site"], row["status"], ago, left or "not shown")
    return table
