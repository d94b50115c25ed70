"""What it costs to write privacy down before spending it: reserve and commit on disk, alone and for a whole round.

A reservation is two synced writes (the counter, then SQLite's log), a commit two more; beside it stand two and four
bare fsyncs of a small file in the same directory, so that a slow disk shows as what it is.
"""

import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median, quantiles

from benchmarks.machine import Row, Section, describe_machine, print_section
from privacy.events import dp_sgd
from privacy.ledger import Budget, Charge, Ledger, Refusal, ReleaseIdentity, Terms

RESERVE_LIMIT_MS = 10.0
CLIENTS, ROUNDS = 1000, 5
EVENT = dp_sgd(0.01, 1.1, 10)


def measure_ledger(repeat: int = 300) -> Section:
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:  # not /tmp: it may be memory
        single = _reserve_and_commit_ms(Path(folder), repeat)
        reserve_ms, commit_ms, verify_ms = _simulated_round_ms(Path(folder))
        bare = {f"{count} bare fsyncs": _fsyncs_ms(Path(folder), count, repeat) for count in (2, 4)}
    beside = {name: median(times) for name, times in bare.items()}
    worst = {name: _p95(times) for name, times in bare.items()}
    return Section(
        "privacy ledger",
        f"Wall time on the disk of the working directory. One account: {repeat} times reserve + commit. Round: "
        f"{CLIENTS} accounts in one transaction, median of {ROUNDS}. Verify: all of that ledger anew.",
        [
            Row("reserve + commit, median", median(single), "ms", RESERVE_LIMIT_MS, beside),
            Row("reserve + commit, 95th percentile", _p95(single), "ms", RESERVE_LIMIT_MS, worst),
            Row(f"reserve a round of {CLIENTS} clients", reserve_ms, "ms"),
            Row(f"commit a round of {CLIENTS} clients", commit_ms, "ms"),
            Row(f"verify {2 * CLIENTS * (ROUNDS + 1) + 1} entries", verify_ms, "ms"),
        ],
    )


def _charge(account: str, number: int) -> Charge:
    return Charge(account, ReleaseIdentity("benchmark", number, 0, account), EVENT, "add-remove")


def _reserve_and_commit_ms(folder: Path, repeat: int) -> list[float]:
    with Ledger.create(folder / "single.sqlite", "benchmark") as ledger:
        budget = Budget(1000.0, 1e-6)
        ledger.open_account("data/sample", dataset="data", unit="sample", relation="add-remove", budget=budget)

        def once(number: int) -> None:
            ledger.commit([ledger.reserve(_charge("data/sample", number))])

        once(0)  # computes the event's RDP, once
        return [_ms(partial(once, number)) for number in range(1, repeat + 1)]


def _simulated_round_ms(folder: Path) -> tuple[float, float, float]:
    names = [f"client-{number}/sample" for number in range(CLIENTS)]
    reserve_ms, commit_ms = [], []
    with Ledger.create(folder / "round.sqlite", "benchmark") as ledger:
        ledger.open_accounts([Terms(name, name, "sample", "add-remove", None, 1e-5) for name in names])
        for number in range(ROUNDS):
            charges = [_charge(name, number) for name in names]
            start = time.perf_counter()
            results = ledger.reserve_all(charges)
            reserve_ms.append((time.perf_counter() - start) * 1e3)
            granted = [result for result in results if not isinstance(result, Refusal)]
            commit_ms.append(_ms(partial(ledger.commit, granted)))
        verify_ms = _ms(ledger.verify)
    return median(reserve_ms), median(commit_ms), verify_ms


def _fsyncs_ms(folder: Path, count: int, repeat: int) -> list[float]:
    descriptor = os.open(folder / f"bare-{count}", os.O_CREAT | os.O_WRONLY)

    def write() -> None:
        for _ in range(count):
            os.write(descriptor, bytes(512))
            os.fsync(descriptor)

    try:
        return [_ms(write) for _ in range(repeat)]
    finally:
        os.close(descriptor)


def _ms(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return (time.perf_counter() - start) * 1e3


def _p95(times: list[float]) -> float:
    return quantiles(times, n=20)[-1]


if __name__ == "__main__":
    print(describe_machine())
    print_section(measure_ledger())
