"""How long ε takes: after each of 10,000 rounds, for a noise that meets a target, and by all three accountants.

Run it: `python -m benchmarks.privacy_accounting`.
"""

import time
from collections.abc import Callable
from typing import TypeVar

from dp_accounting.dp_event import DpEvent

from benchmarks.machine import Row, Section, print_section
from privacy import events
from privacy.accounting import RunningEpsilon, epsilon, epsilons
from privacy.calibration import solve_noise

T = TypeVar("T")
ROUNDS = 10_000
DELTA = 1e-5
ROUND_LIMIT_MS = 50.0
SCHEDULES = {
    "q = 0.004, σ = 1.1, 5 steps a round": (0.004, 1.1, 5),
    "q = 0.01, σ = 1.0, 10 steps a round": (0.01, 1.0, 10),
    "q = 0.0001, σ = 0.5, 1 step a round": (0.0001, 0.5, 1),
}


def measure_accounting() -> Section:
    rows = [row for name, schedule in SCHEDULES.items() for row in _every_round(name, *schedule)]
    return Section(
        "Accounting",
        f"Wall time. ε by PLD after each of {ROUNDS:,} rounds (δ = {DELTA:g}); beside the mean, one composition from "
        "scratch at the last round. The worst rounds are the first, and those whose grid is built anew, coarser; "
        "all but a thousandth of rounds leaves them out, the mean does not. Then the noise for a target, and ε by PLD, "
        "RDP and PRV together.",
        [*rows, *_single_calls()],
    )


def _every_round(name: str, rate: float, noise: float, steps: int) -> list[Row]:
    running = RunningEpsilon(events.dp_sgd(rate, noise, steps), DELTA)
    took: list[float] = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        last = running.add()
        took.append(1000 * (time.perf_counter() - started))
    whole = events.dp_sgd(rate, noise, steps * ROUNDS)
    scratch, scratch_ms = _timed(lambda: epsilon(whole, DELTA))
    ranked = sorted(took)
    return [
        Row(f"{name}: mean", sum(took) / ROUNDS, "ms", ROUND_LIMIT_MS, {"from scratch": scratch_ms}),
        Row(f"{name}: 99.9 % of rounds", ranked[ROUNDS * 999 // 1000], "ms", ROUND_LIMIT_MS),
        Row(f"{name}: worst round", ranked[-1], "ms"),
        Row(f"{name}: ε after all, above scratch", last - scratch, "", beside={"ε": scratch}),
    ]


def _single_calls() -> list[Row]:
    def event(noise: float) -> DpEvent:
        return events.dp_sgd(256 / 60000, noise, 2344)

    epsilons(event(1.0), DELTA)  # imports Opacus, and with it torch
    noise, solve_ms = _timed(lambda: solve_noise(event, 1.0, DELTA))
    _, all_ms = _timed(lambda: epsilons(event(noise), DELTA))
    return [
        Row("noise for ε = 1 (MNIST, 10 epochs)", solve_ms / 1000, "s", beside={"noise": noise}),
        Row("ε by three accountants", all_ms / 1000, "s"),
    ]


def _timed(call: Callable[[], T]) -> tuple[T, float]:
    started = time.perf_counter()
    value = call()
    return value, 1000 * (time.perf_counter() - started)


if __name__ == "__main__":
    print_section(measure_accounting())
