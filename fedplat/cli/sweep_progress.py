"""Progress of a sweep: one bar over its runs on a terminal, one line per run elsewhere."""

import time
from types import TracebackType
from typing import TYPE_CHECKING, Self

from fedplat.cli.progress import score_line
from fedplat.errors import FedplatError
from fedplat.events import Evaluated, Event, RoundFinished
from fedplat.job import Job

if TYPE_CHECKING:
    from rich.console import Console

    from simulations.sweep import Action
    from simulations.sweep_plan import Point


class PlainSweep:
    """One line per run, for logs: `3/12  local.lr=0.1,seed=0  loss 0.31  accuracy 0.91  4.2 s`."""

    def __init__(self, runs: int, console: "Console") -> None:
        self.done = 0
        self._runs, self._console = runs, console
        self._scores, self._action, self._started = "", "", 0.0
        self._job: Job | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        pass

    def begin(self, point: "Point", action: "Action") -> None:
        self._scores, self._action, self._started = "", action, time.perf_counter()
        self._job = point.job

    def event(self, event: Event) -> None:
        if isinstance(event, Evaluated) and event.where == "server" and self._job is not None:
            self._scores = score_line(event, self._job.evaluation.metric)

    def end(self, point: "Point", error: FedplatError | None) -> None:
        self.done += 1
        seconds = f"{time.perf_counter() - self._started:.1f} s"
        words = {"skip": "finished before", "resume": f"{self._scores}  {seconds}, resumed"}
        outcome = f"failed: {error}" if error else words.get(self._action, f"{self._scores}  {seconds}")
        self._console.print(
            f"{self.done}/{self._runs}  {point.name}  {outcome}", highlight=False, markup=False, soft_wrap=True
        )


class LiveSweep(PlainSweep):
    """A bar over all runs, with the current one and its last scores; failures stay above it as lines."""

    def __init__(self, runs: int, console: "Console") -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        super().__init__(runs, console)
        self._progress = Progress(
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("runs"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[point]}  {task.fields[scores]}", markup=False),
            console=console,
        )
        self._task = self._progress.add_task("sweep", total=runs, point="", scores="")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._progress.stop()

    def begin(self, point: "Point", action: "Action") -> None:
        super().begin(point, action)
        self._progress.update(self._task, point=point.name, scores="")

    def event(self, event: Event) -> None:
        super().event(event)
        if isinstance(event, RoundFinished) and self._job is not None:
            self._progress.update(self._task, completed=self.done + event.round / self._job.job.rounds)
        self._progress.update(self._task, scores=self._scores)

    def end(self, point: "Point", error: FedplatError | None) -> None:
        if error:
            super().end(point, error)
        else:
            self.done += 1
        self._progress.update(self._task, completed=self.done)
