"""How long a person waits: for `fedplat --help`, and for `fedplat simulate` to begin its first round.

Each command is a fresh process, and takes turns with its peers, so that a busy machine slows all alike.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from benchmarks.machine import Row, Section

FEDPLAT = str(Path(sys.executable).parent / "fedplat")
HELP_LIMIT_S, FIRST_ROUND_LIMIT_S = 0.5, 4.0
HEAVY_IMPORTS = "import torch, flwr.serverapp, sklearn.datasets"


def measure_help(repeat: int = 7) -> Section:
    times = _take_turns(
        {
            "fedplat --help": lambda: _wall_s([FEDPLAT, "--help"]),
            "python -c pass": lambda: _python_s("pass"),
            "import torch": lambda: _python_s("import torch"),
        },
        repeat,
    )
    return Section(
        "fedplat --help",
        f"Wall time of a fresh process, median of {repeat}.",
        [_first_beside_others(times, HELP_LIMIT_S)],
    )


def measure_first_round(repeat: int = 5) -> Section:
    times = _take_turns(
        {"fedplat simulate → round 1": first_round_s, HEAVY_IMPORTS: lambda: _python_s(HEAVY_IMPORTS)}, repeat
    )
    return Section(
        "fedplat simulate: time to the first round",
        f"From the start of the process to the `round_started` event of round 1; the built-in job, median of {repeat}.",
        [_first_beside_others(times, FIRST_ROUND_LIMIT_S)],
    )


def _take_turns(commands: dict[str, Callable[[], float]], repeat: int) -> dict[str, float]:
    """Median of each command; one untimed turn first, to have the files in the page cache."""
    times: dict[str, list[float]] = {name: [] for name in commands}
    for turn in range(repeat + 1):
        for name, run in commands.items():
            seconds = run()
            if turn > 0:
                times[name].append(seconds)
    return {name: median(values) for name, values in times.items()}


def _first_beside_others(times: dict[str, float], limit_s: float) -> Row:
    (what, value), *others = times.items()
    return Row(what, value, "s", limit_s, dict(others))


def _python_s(code: str) -> float:
    return _wall_s([sys.executable, "-c", code])


def _wall_s(command: list[str]) -> float:
    started = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def first_round_s() -> float:
    """The run's own clock tells when round 1 began; what comes after it isn't counted."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [FEDPLAT, "simulate", "--out", str(run), "--quiet", "--set", "job.rounds=1"]
        started = time.time()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=folder)
        for line in (run / "events.jsonl").read_text(encoding="utf-8").splitlines():
            event = json.loads(line)
            if event["event"] == "round_started" and event["round"] == 1:
                return float(event["time"]) - started
    raise RuntimeError(f"{' '.join(command)}: no round was started")
