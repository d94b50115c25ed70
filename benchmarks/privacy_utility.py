"""Does private training learn as well as elsewhere? MNIST at one site beside Opacus's published figures at the same ε.

The figures are from the README of Opacus's MNIST example (averages of ten runs): same CNN, sample rate 0.004, δ = 1e-5.
Ours is one run of each setting; the noise is solved by PLD for the ε that is printed there.
"""

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.machine import Row, Section

SCENARIO = Path(__file__).parents[1] / "simulations" / "scenarios" / "mnist_private.toml"
POINTS = 2.0


@dataclass(frozen=True)
class Published:
    epsilon: float
    accuracy: float
    rounds: int
    lr: float
    clip_norm: float


PUBLISHED = (
    Published(1.19, 94.63, 15, 0.25, 1.5),
    Published(3.01, 96.78, 60, 0.15, 1.0),
    Published(7.10, 97.09, 45, 0.25, 1.5),
)


def measure_utility(data: Path) -> Section:
    rows = []
    for published in PUBLISHED:
        found = _run(published, data)
        what = f"MNIST test accuracy at ε = {published.epsilon} (claimed {found['epsilon']:.3f})"
        beside = {"Opacus published": published.accuracy}
        accuracy = 100 * found["test_accuracy"]
        rows.append(Row(what, accuracy, "%", at_least=published.accuracy - POINTS, beside=beside))
    how = (
        "simulations/scenarios/mnist_private.toml with the published epochs, learning rate and clip norm; one run each."
    )
    return Section("Utility", how, rows)


def _run(published: Published, data: Path) -> dict[str, float]:
    settings = {
        "data.dir": f"'{data}'",
        "job.rounds": published.rounds,
        "evaluation.every": published.rounds,
        "local.lr": published.lr,
        "privacy.epsilon": published.epsilon,
        "privacy.clip_norm": published.clip_norm,
    }
    overrides = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "fedplat", "simulate", str(SCENARIO), *overrides, "--engine", "serial"]
        output = subprocess.run(
            [*command, "--out", f"{folder}/run", "--json", "--quiet"], capture_output=True, text=True, check=True
        )
    return dict(json.loads(output.stdout.splitlines()[-1]))
