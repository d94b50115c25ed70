"""Simulated clients per second, beside Flower's Ray simulation, pfl and a bare loop: `make bench-simulation`.

Every contender trains the same model on the same arrays with the same steps and batches (`benchmarks.workloads`), each
run in a fresh tree of processes. Contenders take turns, so that a busy machine slows all alike; the reported run is the
median. Memory is measured in a run of its own, because reading it slows the reader's neighbours. A full run writes
`benchmarks/results/<date>-simulation.{json,md}`.
"""

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from benchmarks.contenders import (
    Contender,
    Measurement,
    bare_loop,
    checkpointed,
    fedplat,
    flower_ray,
    loss_of,
    pfl_fedavg,
    pfl_python,
)
from benchmarks.machine import Row, Section, describe_machine, print_section, write_results
from benchmarks.process_tree import RunError, machine_busy_s
from benchmarks.simulation_goals import ENGINES, Results, best_engine, goal_rows
from benchmarks.workloads import DATA_VARIABLE, WORKLOADS, Workload, write_arrays

PEERS = ("ray", "pfl", "pfl2", "bare", "bare2")
CORES = 2
"""The goals of issue 3 are for two cores."""
PEACE_CORES = 0.2
"""What others may use of the machine without a run being repeated."""
WORK_TOLERANCE = 0.15
"""How far a contender's fall of the loss may be from the bare loop's before its speed means nothing."""


def main() -> None:
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # ends the contender and its files too
    options = _options()
    contenders = _contenders(options)
    machine = describe_machine()
    print(machine, flush=True)
    sections = []
    with tempfile.TemporaryDirectory(prefix="fedplat-bench-") as folder:
        os.environ[DATA_VARIABLE] = folder
        for key in options.workload:
            write_arrays(WORKLOADS[key], Path(folder))
            sections.append(_measure_workload(WORKLOADS[key], contenders, options))
            print_section(sections[-1])
    if set(options.workload) == set(WORKLOADS) and set(options.contender) >= {*ENGINES, *PEERS}:
        print(f"\nwritten: {write_results('simulation', machine, sections)}")
    judged = [(f"{s.title[:3]} {row.what}", row.met) for s in sections for row in s.rows if row.met is not None]
    missed = [what for what, met in judged if not met]
    print(f"\n{len(missed)} of {len(judged)} goals missed{': ' + '; '.join(missed) if missed else ''}")
    if invalid := [section.title for section in sections if "FAILED" in section.how or "DIFFERENT WORK" in section.how]:
        raise SystemExit(f"error: a contender failed or did other work in {', '.join(invalid)}: see above")


def _contenders(options: argparse.Namespace) -> dict[str, Contender]:
    named = options.contender
    everybody = [fedplat(engine) for engine in ENGINES]
    everybody += [fedplat("ray", "our-ray"), flower_ray(CORES)]
    if {"pfl", "pfl2"} & set(named):
        python = pfl_python(options.pfl_python)
        everybody += [pfl_fedavg(1, python), pfl_fedavg(CORES, python)]
    everybody += [bare_loop(1), bare_loop(CORES)]
    return {contender.name: contender for contender in everybody if contender.name in named}


# --- measuring ------------------------------------------------------------------------------------


def _measure_workload(workload: Workload, contenders: Mapping[str, Contender], options: argparse.Namespace) -> Section:
    print(f"\n({workload.key}) {workload.describe()}", flush=True)
    results, failures = _take_turns(workload, contenders, options)
    best = best_engine(results)
    everybody = dict(contenders)
    if best is not None:
        extra = checkpointed(contenders[best])
        everybody[extra.name] = extra
        more, more_failures = _take_turns(workload, {extra.name: extra}, options)
        results, failures = results | more, failures | more_failures
    rows = [_speed_row(everybody[name].title, result) for name, result in results.items()]
    notes = [f"{everybody[name].title} FAILED: {reason.splitlines()[0]}" for name, reason in failures.items()]
    notes += _different_work(workload, results, everybody)
    return Section(
        f"({workload.key}) {workload.title}",
        f"{workload.describe()}. {options.rounds} rounds; clients per second in steady rounds (without the first), "
        f"beside: of the whole run from start to exit, seconds to the end of the first round and from the end "
        f"of the last to exit, peak PSS of the process tree, processes, loss of the final model, and how many cores "
        f"other programs kept busy at worst. {_count(options.repeat)} in turns, memory from a run of its own. "
        f"Goals are for our fastest engine; beside it our others, each over the pfl with as many processes as itself. "
        f"{' '.join(f'{note}.' for note in notes)}".strip(),
        [*rows, *(goal_rows(workload.key, results, best) if best else [])],
    )


def _count(repeat: int) -> str:
    return "One run" if repeat == 1 else f"Medians of {repeat} runs"


def _take_turns(
    workload: Workload, contenders: Mapping[str, Contender], options: argparse.Namespace
) -> tuple[Results, dict[str, str]]:
    """The median of each contender, or why it failed."""
    runs: dict[str, list[Measurement]] = {name: [] for name in contenders}
    failures: dict[str, str] = {}
    for turn in range(options.repeat + 1):
        memory = turn == options.repeat
        for name, contender in contenders.items():
            if name in failures:
                continue
            try:
                run = _measure_quietly(contender, workload, options, memory)
            except RunError as error:
                print(f"  {contender.title} FAILED: {error}", flush=True)
                failures[name] = str(error)
                continue
            runs[name].append(run)
            _print_run("memory" if memory else f"turn {turn + 1}", contender.title, run)
    return {name: _median(values) for name, values in runs.items() if name not in failures}, failures


def _measure_quietly(
    contender: Contender, workload: Workload, options: argparse.Namespace, memory: bool
) -> Measurement:
    """The first run that others left in peace, or the least disturbed of a few; memory doesn't mind."""
    runs: list[Measurement] = []
    for _ in range(1 if memory else options.attempts):
        _wait_for_quiet(options.patience)
        runs.append(contender.measure(workload, options.rounds, options.timeout, memory))
        if runs[-1].others_cores <= PEACE_CORES:
            break
    return min(runs, key=lambda run: run.others_cores)


def _print_run(when: str, title: str, run: Measurement) -> None:
    parts = [f"{run.steady_per_s:,.1f}/s steady", f"{run.whole_per_s:,.1f}/s whole", f"{run.first_round_s:.2f} s first",
             f"{run.after_s:.2f} s after", f"{run.processes} processes", f"loss {run.loss:.4f}"]  # fmt: skip
    parts += [f"{run.peak_pss_mb:,.0f} MB"] if run.peak_pss_mb else []
    print(f"  {when:7} {title}: {', '.join(parts)}; others {run.others_cores:.2f} cores", flush=True)


def _median(runs: Sequence[Measurement]) -> Measurement:
    """The last run is the one in which memory was watched: it counts for nothing else."""
    *timed, watched = runs
    return Measurement(
        steady_per_s=median(run.steady_per_s for run in timed),
        whole_per_s=median(run.whole_per_s for run in timed),
        first_round_s=median(run.first_round_s for run in timed),
        after_s=median(run.after_s for run in timed),
        loss=median(run.loss for run in timed),
        peak_pss_mb=watched.peak_pss_mb,
        processes=watched.processes,
        others_cores=max(run.others_cores for run in timed),
    )


def _wait_for_quiet(patience_s: float) -> None:
    """Wait until others leave the cores in peace, but not for ever."""
    deadline = time.monotonic() + patience_s
    while True:
        before = machine_busy_s()
        time.sleep(0.3)
        if machine_busy_s() - before <= 0.3 * PEACE_CORES or time.monotonic() > deadline:
            return


# --- judging --------------------------------------------------------------------------------------


def _speed_row(title: str, result: Measurement) -> Row:
    beside = {
        "whole run": result.whole_per_s,
        "first round s": result.first_round_s,
        "after the last s": result.after_s,
        "MB": result.peak_pss_mb,
        "processes": result.processes,
        "loss": result.loss,
        "others": round(result.others_cores, 2),
    }
    return Row(title, result.steady_per_s, "clients/s", None, beside)


def _different_work(workload: Workload, results: Results, contenders: Mapping[str, Contender]) -> list[str]:
    """Whoever's loss did not fall as the bare loop's did has not done the same work."""
    if "bare" not in results:
        return []
    before = loss_of(workload)
    fall = before - results["bare"].loss
    return [
        f"{contenders[name].title} did DIFFERENT WORK (its loss {before:.3g} → {result.loss:.3g})"
        for name, result in results.items()
        if not abs((before - result.loss) / fall - 1) <= WORK_TOLERANCE
    ]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulation", description=__doc__)
    everybody = [*ENGINES, "our-ray", *PEERS]

    parser.add_argument("--workload", type=_Names(list(WORKLOADS)), default=list(WORKLOADS), help="e.g. a,b")
    parser.add_argument("--contender", type=_Names(everybody), default=everybody, help=", ".join(everybody))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeat", type=int, default=3, help="timed runs of each contender")
    parser.add_argument("--timeout", type=float, default=600, help="seconds that one run may take")
    parser.add_argument("--attempts", type=int, default=3, help="repetitions of a run that others disturbed")
    parser.add_argument("--patience", type=float, default=20, help="seconds to wait before a run for a quiet machine")
    parser.add_argument("--pfl-python", help="interpreter with pfl 0.6; default: .venv-pfl, made if missing")
    options = parser.parse_args()
    if options.rounds < 2 or options.repeat < 1:
        parser.error("--rounds must be at least 2 (the first isn't steady) and --repeat at least 1")
    return options


class _Names:
    """A comma-separated list of known names."""

    def __init__(self, known: Sequence[str]) -> None:
        self._known = known

    def __call__(self, text: str) -> list[str]:
        names = text.split(",")
        if unknown := [name for name in names if name not in self._known]:
            raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)} (known: {', '.join(self._known)})")
        return names


if __name__ == "__main__":
    main()
