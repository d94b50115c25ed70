"""Table 1 of the FedAvg paper (McMahan et al. 2017): rounds until the MNIST 2NN reaches 97 % test accuracy.

`make bench-mcmahan DATA=PATH/TO/MNIST` runs both scenarios with three seeds and prints the median beside the paper's
figure; the goal is at most 10 % more rounds. The learning rate in the scenarios was chosen by hand from 0.05, 0.1 and
0.2 (the paper tuned its own).
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from benchmarks.machine import Row, Section, describe_machine, print_section, write_results

SCENARIOS = Path(__file__).parents[1] / "simulations/scenarios"
PAPER = {"mcmahan_2nn_iid": 87, "mcmahan_2nn_noniid": 664}
SEEDS = (0, 1, 2)
TIMEOUT_S = 900


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with MNIST's four IDX files")
    data = parser.parse_args().data.resolve()
    machine = describe_machine()
    rows = []
    for scenario, paper_rounds in PAPER.items():
        runs = [run_scenario(scenario, seed, data) for seed in SEEDS]
        rounds = [run["rounds"] for run in runs]
        beside = {f"seed {seed}": float(number) for seed, number in zip(SEEDS, rounds, strict=True)}
        beside["paper"] = float(paper_rounds)
        beside["median wall s"] = median(run["wall_s"] for run in runs)
        reached = all(run["test_accuracy"] >= 0.97 for run in runs)
        rows.append(Row(f"{scenario}: rounds to 97 %", median(rounds), "", 1.1 * paper_rounds, beside))
        if not reached:
            rows.append(Row(f"{scenario}: seeds that never got there", 1, "", 0, {}))
    section = Section("McMahan et al. 2017, Table 1, 2NN", "C = 0.1, E = 1, B = 10; median of three seeds.", rows)
    print_section(section)
    print(f"written: {write_results('mcmahan', machine, [section])}")


def run_scenario(name: str, seed: int, data: Path) -> dict[str, float]:
    """One run of the real command, in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="fedplat-mcmahan-") as folder:
        command = [sys.executable, "-m", "fedplat", "simulate", str(SCENARIOS / f"{name}.toml")]
        command += ["--set", f"job.seed={seed}", "--set", f"data.dir={data}", "--engine", "vector"]
        command += ["--out", f"{folder}/run", "--json", "--quiet"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    summary: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return summary


if __name__ == "__main__":
    main()
