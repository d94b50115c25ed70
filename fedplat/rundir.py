"""The run directory `runs/<id>/`: everything about one run, readable without fedplat.

    job.toml            the resolved job: every default written out
    events.jsonl        what happened (see fedplat.events)
    model.safetensors   the final model, frozen parameters included
    best.safetensors    the model with the best value of evaluation.metric
    checkpoints/        the last committed rounds, for `fedplat resume`
    plots/              pictures
    ledger.sqlite       what a private job's virtual clients have spent (see privacy.ledger)

A lock keeps two processes from driving the same run.
"""

import contextlib
import fcntl
import os
import re
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

from fedplat.errors import UsageError
from fedplat.files import write_file
from fedplat.job import Job, parse_job


class RunDirectory:
    """Paths of one run. Create it with `create`, find it with `open`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def id(self) -> str:
        return self.path.resolve().name

    @property
    def job_file(self) -> Path:
        return self.path / "job.toml"

    @property
    def events_file(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def model_file(self) -> Path:
        return self.path / "model.safetensors"

    @property
    def best_file(self) -> Path:
        return self.path / "best.safetensors"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def ledger_file(self) -> Path:
        return self.path / "ledger.sqlite"

    @property
    def plots(self) -> Path:
        return self.path / "plots"

    @classmethod
    def create(cls, path: Path, job: Job) -> "RunDirectory":
        """Make a new run directory; one that exists is never touched. A private job's is for its owner only."""
        # Its log names secret cohorts, and its checkpoints may hold noise that can be taken off the model.
        mode = 0o777 if job.privacy is None else 0o700
        try:
            path.mkdir(mode, parents=True)
        except FileExistsError:
            raise UsageError(
                f"{path} exists already. Choose another --out, or continue it with: fedplat resume {path}"
            ) from None
        except OSError as error:
            raise UsageError(f"{path}: can't be created: {error.strerror}") from None
        run = cls(path)
        try:
            run.checkpoints.mkdir(mode)
            run.write_job(job)
        except OSError as error:
            raise UsageError(f"{path}: can't be written: {error.strerror}") from None
        return run

    @classmethod
    def open(cls, path: Path) -> "RunDirectory":
        run = cls(path)
        if not run.job_file.is_file():
            raise UsageError(f"{path}: not a fedplat run directory (no job.toml). List them with: fedplat runs list")
        return run

    def write_job(self, job: Job) -> None:
        write_file(self.job_file, job.to_toml().encode())

    def job(self) -> Job:
        try:
            return parse_job(self.job_file.read_text(encoding="utf-8"), str(self.job_file))
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{self.job_file}: can't be read: {error}") from None

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Refuse to drive a run that another process is driving. A crash releases the lock too."""
        with (self.path / ".lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise UsageError(f"{self.path}: another process is driving this run") from None
            yield


def runs_root() -> Path:
    return Path(os.environ.get("FEDPLAT_RUNS", "runs"))


def new_run_path(job: Job, root: Path | None = None) -> Path:
    """`runs/<job name>-<UTC time>-<random>`: sorts by time, never collides."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    return (root or runs_root()) / f"{job.job.name}-{stamp}-{secrets.token_hex(2)}"


def find_run(reference: str) -> RunDirectory:
    """A run by path, by id under the runs directory, by unique prefix, or `latest`."""
    if (Path(reference) / "job.toml").is_file() or re.search(r"[/\\]", reference):
        return RunDirectory.open(Path(reference))
    runs = list_runs()
    if reference == "latest" and runs:
        return runs[-1]
    matches = [run for run in runs if run.id.startswith(reference)]
    exact = [run for run in matches if run.id == reference]
    if len(exact or matches) != 1:
        problem = "matches several runs" if matches else "no such run"
        raise UsageError(f"{reference}: {problem} in {runs_root()}. List them with: fedplat runs list")
    return (exact or matches)[0]


def list_runs(root: Path | None = None) -> list[RunDirectory]:
    """All runs, oldest first."""
    folder = root or runs_root()
    found = [path for path in folder.iterdir() if (path / "job.toml").is_file()] if folder.is_dir() else []
    return [RunDirectory(path) for path in sorted(found, key=lambda p: (p / "job.toml").stat().st_mtime_ns)]
