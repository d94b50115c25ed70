"""Speed and memory of the foundation, each number beside its limit: `python -m benchmarks.foundation`.

Start-up of the command line, time to the first round, memory of the server by cohort size, and the overhead of
the local training loop. A full run writes `benchmarks/results/<date>-foundation.{json,md}`.
"""

import argparse
from collections.abc import Callable

from benchmarks.local_loop import measure_loop
from benchmarks.machine import Section, describe_machine, print_section, write_results
from benchmarks.server_memory import measure_memory
from benchmarks.startup import measure_first_round, measure_help

BENCHMARKS: dict[str, Callable[[int | None], Section]] = {
    "help": lambda repeat: measure_help(repeat or 7),
    "first-round": lambda repeat: measure_first_round(repeat or 5),
    "memory": lambda repeat: measure_memory(),
    "loop": measure_loop,
}


def main() -> None:
    options = _options()
    machine = describe_machine()
    print(machine)
    sections = []
    for name in [options.only] if options.only else list(BENCHMARKS):
        sections.append(BENCHMARKS[name](options.repeat))
        print_section(sections[-1])
    if not options.only:
        print(f"\nwritten: {write_results('foundation', machine, sections)}")
    missed = [row.what for section in sections for row in section.rows if row.met is False]
    print(f"\n{len(missed)} goals missed{': ' + '; '.join(missed) if missed else ''}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.foundation", description=__doc__)
    parser.add_argument("--only", choices=BENCHMARKS, help="measure one thing; no results file is written")
    parser.add_argument("--repeat", type=int, metavar="N", help="repetitions of what is reported as a median")
    return parser.parse_args()


if __name__ == "__main__":
    main()
