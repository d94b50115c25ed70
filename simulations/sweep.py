"""Run a sweep, and run it again: finished points are skipped, stopped ones resumed, missing ones started.

    sweeps/<id>/sweep.toml      the base job as given, the grid, the seeds, and the digest of every point's job
    sweeps/<id>/<point>/        an ordinary run directory per point (see fedplat.rundir)
    sweeps/<id>/results.*       written by simulations.sweep_results

The law kept here: a sweep that was stopped at any moment and continued has the models of one never stopped. It
follows from the same law of a run, because a point's run directory is the only state there is.
"""

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import tomli_w

from fedplat import canonical
from fedplat.errors import FedplatError, UsageError
from fedplat.events import Event
from fedplat.files import write_file
from fedplat.job import Job
from fedplat.rundir import RunDirectory
from fedplat.summary import summarise
from simulations.sweep_plan import Point, SweepSpec

SWEEP_FILE = "sweep.toml"
Action = Literal["start", "resume", "skip"]


class Observer(Protocol):
    """Who watches a sweep: a progress bar, a test."""

    def begin(self, point: Point, action: Action) -> None: ...

    def event(self, event: Event) -> None: ...

    def end(self, point: Point, error: FedplatError | None) -> None: ...


def read_spec(folder: Path) -> SweepSpec:
    """What was asked for when the sweep started, for `fedplat sweep --resume`."""
    table = _read_table(folder)
    try:
        grid = tuple(str(text) for text in table["grid"])
        return SweepSpec(base=dict(table["base"]), grid=grid, seeds=int(table["seeds"]))
    except (KeyError, TypeError, ValueError):
        raise UsageError(f"{folder / SWEEP_FILE}: not a sweep file (base, grid, seeds)") from None


def open_sweep(folder: Path, spec: SweepSpec, points: Sequence[Point]) -> None:
    """Make the sweep's directory, or make sure that it holds this very sweep."""
    wanted = _as_table(spec, points)
    if (folder / SWEEP_FILE).is_file():
        differences = _differences(read_spec(folder), spec)
        if differences:
            raise UsageError(
                f"{folder}: holds another sweep: it differs in {', '.join(differences)}. Choose another --out, "
                f"or continue that one with: fedplat sweep --resume {folder}"
            )
        if _read_table(folder).get("points") != wanted["points"]:
            raise UsageError(
                f"{folder}: the jobs of its points have changed since it started (the file task.init_from, or "
                f"fedplat's defaults). Choose another --out to start anew"
            )
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise UsageError(f"{folder}: exists already and holds no sweep (no {SWEEP_FILE}). Choose another --out")
        write_file(folder / SWEEP_FILE, tomli_w.dumps(wanted).encode())
    except OSError as error:
        raise UsageError(f"{folder}: can't be created: {error.strerror}") from None


def run_points(folder: Path, points: Sequence[Point], observer: Observer) -> dict[str, str]:
    """Bring every point to its end; returns the reasons of those that failed. The others go on."""
    from simulations.simulate import resume

    failures: dict[str, str] = {}
    with RunDirectory(folder).locked():
        actions = [_action(RunDirectory(folder / point.name), point) for point in points]
        for point, action in zip(points, actions, strict=True):
            observer.begin(point, action)
            failure: FedplatError | None = None
            try:
                if action == "start":
                    _start(folder / point.name, point.job, observer)
                elif action == "resume":
                    resume(RunDirectory(folder / point.name), (observer.event,))
            except FedplatError as error:
                failure, failures[point.name] = error, str(error)
            observer.end(point, failure)
    return failures


def _start(path: Path, job: Job, observer: Observer) -> None:
    """Settle the engine before the directory exists: a run stopped in between would be resumed on another engine."""
    from simulations.choose import settle_engine
    from simulations.simulate import simulate

    settled, _ = settle_engine(job)
    simulate(settled, RunDirectory.create(path, settled), (observer.event,))


def _action(run: RunDirectory, point: Point) -> Action:
    if not run.path.exists():
        return "start"
    if not run.job_file.is_file():
        _remove_unborn(run)
        return "start"
    if not _is_job_of(run.job(), point):
        raise UsageError(f"{run.path}: its job.toml is not that of this sweep (edited?). Move it away to run it anew")
    return "skip" if run.events_file.exists() and summarise(run).status == "finished" else "resume"


def _is_job_of(job: Job, point: Point) -> bool:
    """Whether a run's job is the point's, or the point's with `simulation.engine = "auto"` settled by that run."""
    wanted = point.job.simulation
    if wanted.engine == "auto":
        unsettled = job.simulation.model_copy(update={"engine": wanted.engine, "chunk": wanted.chunk})
        job = job.model_copy(update={"simulation": unsettled})
    return job.digest == point.job.digest


def _remove_unborn(run: RunDirectory) -> None:
    """A kill while a run directory was being made leaves it without a job; nothing else is ever removed."""
    try:
        (run.path / f".{run.job_file.name}.part").unlink(missing_ok=True)
        if run.checkpoints.is_dir():
            run.checkpoints.rmdir()
        run.path.rmdir()
    except OSError:
        raise UsageError(f"{run.path}: in the way, and not a run of this sweep. Move it away") from None


def _as_table(spec: SweepSpec, points: Sequence[Point]) -> dict[str, Any]:
    return {
        "seeds": spec.seeds,
        "grid": list(spec.grid),
        "base": dict(spec.base),
        "points": {point.name: point.job.digest for point in points},
    }


def _read_table(folder: Path) -> dict[str, Any]:
    path = folder / SWEEP_FILE
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"{folder}: not a sweep (no {SWEEP_FILE}). Start one with: fedplat sweep --grid …") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"{path}: can't be read: {error}") from None


def _differences(found: SweepSpec, wanted: SweepSpec) -> list[str]:
    """In which respects two sweeps differ, in words."""
    same = {
        "the base job": canonical.dumps(found.base) == canonical.dumps(wanted.base),
        "the grid": repr(found.axes) == repr(wanted.axes),  # repr: 1, 1.0 and true are equal in Python
        "the seeds": found.seeds == wanted.seeds,
    }
    return [what for what, equal in same.items() if not equal]
