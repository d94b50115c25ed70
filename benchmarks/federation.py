"""Our federation beside plain Flower, on real processes over TLS: `python -m benchmarks.federation`.

A small model on three sites: what a train phase costs. A large model on two sites: whether it arrives, in what time and
memory, also while something else keeps all cores busy. A full run writes `benchmarks/results/<date>-federation.*`.
"""

import argparse
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.federation_runs import FederationRun, RunFailed, run_ours, run_plain
from benchmarks.large_model import TASK
from benchmarks.machine import Row, Section, describe_machine, print_section, write_results
from fedplat.job import Job, validate_job

SMALL_SITES, LARGE_SITES = 3, 2
OVER_PLAIN = 1 / 5
"""Issue 5: a train phase costs at most this part of plain Flower's."""
MEMORY_OVER_MODEL = 6.8
"""Issue 5: what plain Flower's ServerApp took for 400 MB, as a multiple of the model."""
DEADLINE_S = 1200.0


def small_job(rounds: int) -> Job:
    return _job("small", rounds, SMALL_SITES, {"name": "digits"})


def large_job(rounds: int, parameters: int) -> Job:
    return _job("large", rounds, LARGE_SITES, {"name": TASK, "args": {"parameters": parameters}})


def _job(name: str, rounds: int, sites: int, task: dict[str, object]) -> Job:
    table = {
        "job": {"name": f"federation-{name}", "rounds": rounds},
        "task": task,
        "cohort": {"clients": sites, "fraction": 1.0, "deadline_s": DEADLINE_S},
    }
    return validate_job(table, name)


def measure_small(options: argparse.Namespace) -> Section:
    job = small_job(options.rounds)
    ours = _in_folder(lambda folder: run_ours(job, folder, DEADLINE_S))
    rows = []
    if options.ours:
        rows += [
            Row("train phase", ours.round_s, "s"),
            Row("whole run", ours.whole_s, "s"),
            Row("processor time of all parties", ours.cpu_s, "s"),
        ]
    else:
        plain = _in_folder(lambda folder: run_plain(job, folder, DEADLINE_S))
        rows += [
            Row("train phase", ours.round_s, "s", OVER_PLAIN * plain.round_s, {"plain Flower": plain.round_s}),
            Row("train phase over plain Flower's", ours.round_s / plain.round_s, "×", OVER_PLAIN),
            Row("whole run", ours.whole_s, "s", beside={"plain Flower": plain.whole_s}),
            Row("processor time of all parties", ours.cpu_s, "s", beside={"plain Flower": plain.cpu_s}),
            Row("models that differ", float(ours.model != plain.model), "", 0),
        ]
    how = (
        f"Digits MLP, {SMALL_SITES} sites, {options.rounds} rounds; median train phase (round_started to "
        "round_finished) from the second on. Plain Flower: `flwr run` of the same app and job, SuperLink over TLS with "
        "node authentication, default isolation, database in memory."
    )
    return Section("small model", how, rows)


def measure_large(options: argparse.Namespace) -> Section:
    job, cores = large_job(options.large_rounds, options.parameters), len(os.sched_getaffinity(0))
    model = 4.0 * options.parameters
    contenders: dict[str, Callable[[Path, int], FederationRun]] = {
        "ours": lambda folder, load: run_ours(job, folder, DEADLINE_S, load)
    }
    if not options.ours:
        contenders["plain Flower"] = lambda folder, load: run_plain(job, folder, DEADLINE_S, load, database=True)
    quiet = {name: _attempts(run, 0, 1) for name, run in contenders.items()}
    loaded = {name: _attempts(run, cores, options.runs) for name, run in contenders.items() if options.runs}
    rows = []
    numbers: list[tuple[str, str, Callable[[FederationRun], float], float | None]] = [
        ("whole run", "s", lambda run: run.whole_s, None),
        ("longest train phase", "s", lambda run: max(run.rounds_s), None),
        ("driver's peak memory", "× model", lambda run: run.peaks["driver"] / model, MEMORY_OVER_MODEL),
        ("SuperLink's peak memory", "× model", lambda run: run.peaks["superlink"] / model, None),
    ]
    for what, unit, read, limit in numbers:
        values = {name: read(runs[0]) for name, runs in quiet.items() if runs}
        if "ours" in values:
            rows.append(Row(what, values.pop("ours"), unit, limit, values))
    everything = [("runs that failed", {name: 1 - len(runs) for name, runs in quiet.items()}, 1)]
    if options.runs:
        failed = {name: options.runs - len(runs) for name, runs in loaded.items()}
        everything.append((f"runs that failed with {cores} cores kept busy", failed, options.runs))
    for what, failures, total in everything:
        others = {name: float(count) for name, count in failures.items() if name != "ours"}
        rows.append(Row(what, failures["ours"], f"of {total}", 0, others))
    times = {name: max(run.whole_s for run in runs) for name, runs in loaded.items() if runs}
    if "ours" in times:
        rows.append(Row("slowest whole run with busy cores", times.pop("ours"), "s", None, times))
    how = (
        f"{options.parameters / 1e6:g}M parameters ({model / 1e6:g} MB), {LARGE_SITES} sites, {options.large_rounds} "
        "rounds of one step each. Peak resident size of the process that drives the run (our executor, Flower's "
        "flwr-serverapp) and of the SuperLink; the SuperLink's database is on disk for both."
    )
    return Section("large model", how, rows)


def _attempts(run: Callable[[Path, int], FederationRun], load: int, times: int) -> list[FederationRun]:
    """The runs that finished."""
    finished = []
    for _ in range(times):
        try:
            finished.append(_in_folder(lambda folder: run(folder, load)))
        except RunFailed as failure:
            print(f"  failed: {failure}")
    return finished


def _in_folder(run: Callable[[Path], FederationRun]) -> FederationRun:
    with tempfile.TemporaryDirectory(prefix="fedplat-bench-", ignore_cleanup_errors=True) as folder:
        return run(Path(folder))


MEASURES = {"small": measure_small, "large": measure_large}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.federation", description=__doc__)
    parser.add_argument("--only", choices=MEASURES, help="measure one thing; no results file is written")
    parser.add_argument("--ours", action="store_true", help="leave plain Flower out; no results file is written")
    parser.add_argument("--rounds", type=int, default=6, help="rounds of the small model")
    parser.add_argument("--large-rounds", type=int, default=2, help="rounds of the large model")
    parser.add_argument("--parameters", type=int, default=100_000_000, help="size of the large model")
    parser.add_argument("--runs", type=int, default=3, help="runs of the large model under load")
    options = parser.parse_args()
    machine = describe_machine()
    print(machine)
    sections = []
    for name in [options.only] if options.only else list(MEASURES):
        sections.append(MEASURES[name](options))
        print_section(sections[-1])
    if not (options.only or options.ours):
        print(f"\nwritten: {write_results('federation', machine, sections)}")
    missed = [row.what for section in sections for row in section.rows if row.met is False]
    print(f"\n{len(missed)} goals missed{': ' + '; '.join(missed) if missed else ''}")


if __name__ == "__main__":
    main()
