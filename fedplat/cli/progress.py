"""Progress of a run, drawn from its events: a live bar on a terminal, a few plain lines elsewhere."""

from types import TracebackType
from typing import TYPE_CHECKING, Self

from fedplat.events import (
    ClientFailed,
    ClientTrained,
    Evaluated,
    Event,
    PrivacySpent,
    Resumed,
    RoundFinished,
    RoundStarted,
)
from fedplat.job import Job

if TYPE_CHECKING:
    from rich.console import Console


class LiveProgress:
    """A bar over all clients of all rounds, with the last loss and metric."""

    def __init__(self, job: Job, console: "Console") -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._per_round = job.cohort.cohort_size
        self._metric, self._where = job.evaluation.metric, measured_where(job)
        self._spent = ""
        self._progress = Progress(
            TextColumn("[bold]round {task.fields[round]}/" + str(job.job.rounds)),
            BarColumn(bar_width=28),
            MofNCompleteColumn(),
            TextColumn("clients  {task.fields[scores]}"),
            TimeRemainingColumn(),
            console=console,
        )
        self._task = self._progress.add_task("train", total=job.job.rounds * self._per_round, round=0, scores="")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._progress.stop()

    def __call__(self, event: Event) -> None:
        match event:
            case RoundStarted():
                self._progress.update(self._task, round=event.round)
            case ClientTrained() | ClientFailed(phase="train"):
                self._progress.advance(self._task)
            case RoundFinished() | Resumed():
                self._progress.update(self._task, completed=event.round * self._per_round, round=event.round)
            case PrivacySpent():
                self._spent = f"  ε {event.epsilon:.2f}"
            case Evaluated() if event.where == self._where:
                self._progress.update(self._task, scores=score_line(event, self._metric) + self._spent)
            case _:
                pass


class PlainProgress:
    """About ten lines per run, for logs."""

    def __init__(self, job: Job, console: "Console") -> None:
        self._job, self._console, self._where = job, console, measured_where(job)
        self._every = max(1, job.job.rounds // 10)
        self._spent = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        pass

    def __call__(self, event: Event) -> None:
        if isinstance(event, PrivacySpent):
            self._spent = f"  ε {event.epsilon:.2f}"
        if isinstance(event, Evaluated) and event.where == self._where and event.round % self._every == 0:
            scores = score_line(event, self._job.evaluation.metric)
            self._console.print(f"round {event.round}/{self._job.job.rounds}  {scores}{self._spent}", highlight=False)


def measured_where(job: Job) -> str:
    """Whose measurements a progress shows: the server's, or the clients' where the server makes none."""
    return "server" if job.evaluation.server else "clients"


def score_line(event: Evaluated, metric: str) -> str:
    loss, value = event.metrics.get("loss", float("nan")), event.metrics.get(metric, float("nan"))
    return f"loss {loss:.4f}" + (f"  {metric} {value:.4f}" if metric != "loss" else "")
