"""What issue 3 asks of the simulation engines, as ratios to peers measured in the same run."""

from dataclasses import dataclass

from benchmarks.contenders import Measurement
from benchmarks.machine import Row

AUTO = "auto"
ENGINES = ("serial", "process", "vector", AUTO)
Results = dict[str, Measurement]


@dataclass(frozen=True)
class Goals:
    steady_over_ray: float
    whole_over_ray: float
    steady_over_pfl: float


GOALS = {"a": Goals(20, 8, 10), "b": Goals(3, 4, 1.5), "c": Goals(1.3, 2, 1.1), "d": Goals(30, 8, 10)}
MEMORY_OVER_RAY, MEMORY_OVER_PFL = 1 / 3, 1.2


def best_engine(results: Results) -> str | None:
    """Our fastest in steady rounds. `auto` is one of the others under another name, so it is judged only if alone."""
    engines = [name for name in ENGINES if name in results]
    return max(
        [name for name in engines if name != AUTO] or engines, key=lambda name: results[name].steady_per_s, default=None
    )


def goal_rows(workload: str, results: Results, best: str) -> list[Row]:
    """The ratios of one engine, the same in every row, beside those of our others."""
    goals = GOALS[workload]

    def row(what: str, field: str, peer: str, at_least: float | None = None, limit: float | None = None) -> Row | None:
        ratios = {}
        for name in (name for name in (best, *ENGINES) if name in results):
            rival = results.get(pfl_like(results[name]) if peer == "pfl" else peer)
            if rival is not None:
                ratios[name] = getattr(results[name], field) / getattr(rival, field)
        if best not in ratios:
            return None
        return Row(f"{best}: {what}", ratios.pop(best), "×", limit, ratios, at_least)

    rows = [
        row("steady rounds over Flower + Ray", "steady_per_s", "ray", goals.steady_over_ray),
        row("whole run over Flower + Ray", "whole_per_s", "ray", goals.whole_over_ray),
        row("memory over Flower + Ray", "peak_pss_mb", "ray", limit=MEMORY_OVER_RAY),
        row("steady rounds over pfl, same processes", "steady_per_s", "pfl", goals.steady_over_pfl),
        row("memory over pfl, same processes", "peak_pss_mb", "pfl", limit=MEMORY_OVER_PFL),
        row("steady rounds over a bare loop", "steady_per_s", "bare"),
        row("steady rounds over two bare loops", "steady_per_s", "bare2"),
    ]
    return [row for row in rows if row is not None]


def pfl_like(ours: Measurement) -> str:
    """The pfl to compare with: one process with one, a pool of workers with pfl on all cores."""
    return "pfl" if ours.processes == 1 else "pfl2"
