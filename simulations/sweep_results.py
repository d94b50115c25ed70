"""What a sweep found, read from the event logs of its runs: one row per grid point, over its seeds.

Means and standard deviations (n - 1) are over the finished runs of a row, at the last round each of them evaluated.
Rows are sorted best first by the mean of evaluation.metric; a row with a missing run comes after all complete ones,
because its mean is over survivors. A value that is not finite (a diverged loss) is null in JSON.
"""

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedplat import canonical
from fedplat.files import write_file
from fedplat.rundir import RunDirectory
from fedplat.summary import Summary, summarise
from server_app.stopping import LOWER_IS_BETTER
from simulations.sweep_plan import Point


@dataclass(frozen=True)
class Spread:
    """Mean and standard deviation; one value has no deviation."""

    mean: float
    std: float | None

    @classmethod
    def over(cls, values: Sequence[float]) -> "Spread | None":
        if not values:
            return None
        mean = sum(values) / len(values)
        # Not `** 2`: that raises where a product only overflows to infinity.
        squares = sum((value - mean) * (value - mean) for value in values)
        return cls(mean, math.sqrt(squares / (len(values) - 1)) if len(values) > 1 else None)

    def __str__(self) -> str:
        return f"{self.mean:.4f}" + (f" ± {self.std:.4f}" if self.std is not None else "")


@dataclass(frozen=True)
class Row:
    """One grid point."""

    name: str
    values: Mapping[str, Any]
    metric: str
    seeds: tuple[int, ...]
    runs: tuple[Summary, ...]
    """One per seed, finished or not."""

    @property
    def finished(self) -> tuple[Summary, ...]:
        return tuple(run for run in self.runs if run.status == "finished")

    def final(self, metric: str) -> Spread | None:
        """The metric at the last round."""
        return Spread.over([value for run in self.finished if (value := run.final(metric)) is not None])

    @property
    def best(self) -> float | None:
        """The best value of the metric that any of its runs reached in any round."""
        values = [
            scores[self.metric] for run in self.finished for scores in run.server.values() if self.metric in scores
        ]
        better = min if self.metric in LOWER_IS_BETTER else max
        return better((value for value in values if not math.isnan(value)), default=None)

    @property
    def rounds(self) -> Spread | None:
        return Spread.over([run.rounds for run in self.finished])

    @property
    def seconds(self) -> Spread | None:
        """Seconds of training rounds per run."""
        return Spread.over([round(run.training_s, 3) for run in self.finished])

    @property
    def rank(self) -> tuple[bool, bool, float]:
        score = self.final(self.metric)
        if score is None or math.isnan(score.mean):
            return True, True, 0.0
        return len(self.finished) < len(self.runs), False, score.mean * (1 if self.metric in LOWER_IS_BETTER else -1)

    def numbers(self) -> dict[str, float | None]:
        """The columns of results.csv that are numbers."""
        columns: dict[str, float | None] = {}
        for metric in dict.fromkeys((self.metric, "loss")):
            final = self.final(metric)
            columns |= {f"{metric}_mean": _mean(final), f"{metric}_std": final.std if final else None}
        return columns | {
            f"{self.metric}_best": self.best,
            "rounds": _mean(self.rounds),
            "seconds": _mean(self.seconds),
        }

    def as_json(self) -> dict[str, Any]:
        runs = [
            {"seed": seed, "status": run.status, "reason": run.reason, **run.as_json(run.training_s)}
            for seed, run in zip(self.seeds, self.runs, strict=True)
        ]
        counts = {"finished": len(self.finished), "seeds": list(self.seeds)}
        found = {"name": self.name, "settings": dict(self.values), **counts, **self.numbers(), "runs": runs}
        return {key: _finite(value) for key, value in found.items()}


def collect(folder: Path, points: Sequence[Point]) -> list[Row]:
    """The rows of a sweep, best first."""
    groups: dict[str, list[Point]] = {}
    for point in points:
        groups.setdefault(point.setting, []).append(point)
    rows = [
        Row(
            name,
            group[0].values,
            group[0].job.evaluation.metric,
            tuple(point.seed for point in group),
            tuple(_summary(RunDirectory(folder / point.name)) for point in group),
        )
        for name, group in groups.items()
    ]
    return sorted(rows, key=lambda row: row.rank)


def as_json(folder: Path, rows: Sequence[Row]) -> dict[str, Any]:
    """The contract of `fedplat sweep --json` and of results.json: these keys stay."""
    points = [row.as_json() for row in rows]
    best = points[0] if points and not rows[0].rank[1] else None
    return {"sweep": str(folder), "metric": rows[0].metric, "points": points, "best": best}


def write_results(folder: Path, rows: Sequence[Row]) -> None:
    """Write results.json, results.csv and comparison.png."""
    from fedplat.plots import plot_sweep

    write_file(folder / "results.json", (json.dumps(as_json(folder, rows), indent=2) + "\n").encode())
    write_file(folder / "results.csv", _csv(rows).encode())
    plot_sweep({row.name: row.finished for row in rows}, rows[0].metric, folder / "comparison.png")


def _csv(rows: Sequence[Row]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["name", *rows[0].values, "finished", "seeds", *rows[0].numbers()])
    for row in rows:
        settings = [value if isinstance(value, str) else canonical.dumps(value) for value in row.values.values()]
        writer.writerow([row.name, *settings, len(row.finished), len(row.seeds), *row.numbers().values()])
    return text.getvalue()


def _summary(run: RunDirectory) -> Summary:
    return summarise(run) if run.events_file.exists() else Summary(run=str(run.path))


def _mean(spread: Spread | None) -> float | None:
    return None if spread is None else spread.mean


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
