"""What privacy costs in time and accuracy, each number beside its peer or its limit: `python -m benchmarks.privacy`.

Clipping and whole steps beside Opacus, noise beside its keystream, many clients at once, accounting, ledger, memory,
and with `--data PATH/TO/MNIST` accuracy beside Opacus's published figures. A full run writes
`benchmarks/results/<date>-privacy.*`.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

from benchmarks.machine import Section, describe_machine, print_section, write_results
from benchmarks.privacy_accounting import measure_accounting
from benchmarks.privacy_clients import measure_clients
from benchmarks.privacy_ledger import measure_ledger
from benchmarks.privacy_noise import measure_noise
from benchmarks.privacy_step import measure_clipping, measure_memory, measure_step
from benchmarks.privacy_utility import measure_utility

BENCHMARKS: dict[str, Callable[[], Section]] = {
    "noise": measure_noise,
    "step": measure_step,
    "clients": measure_clients,
    "ledger": measure_ledger,
    "accounting": measure_accounting,
    "clipping": measure_clipping,
    "memory": measure_memory,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.privacy", description=__doc__)
    parser.add_argument("--only", choices=BENCHMARKS, help="measure one thing; no results file is written")
    parser.add_argument("--data", type=Path, help="folder with MNIST's files, for accuracy beside the published one")
    options = parser.parse_args()
    machine = describe_machine()
    print(machine)
    sections = []
    for name in [options.only] if options.only else list(BENCHMARKS):
        sections.append(BENCHMARKS[name]())
        print_section(sections[-1])
    if options.data is not None and not options.only:
        sections.append(measure_utility(options.data.resolve()))
        print_section(sections[-1])
    if not options.only:
        print(f"\nwritten: {write_results('privacy', machine, sections)}")
    missed = [row.what for section in sections for row in section.rows if row.met is False]
    print(f"\n{len(missed)} goals missed{': ' + '; '.join(missed) if missed else ''}")


if __name__ == "__main__":
    main()
