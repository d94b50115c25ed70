"""What noise costs: nanoseconds of one core per parameter, for each sampler, beside the keystream under it.

CPU time of one thread, the median of several turns in which all samplers follow each other, so that a busy
machine slows all alike.
"""

import time
from collections.abc import Callable
from statistics import median

import numpy as np

from benchmarks.machine import Row, Section, describe_machine, print_section

COUNT = 1_000_000
GOAL_MS = 10.0
SIGMA = 2.0**20
STD = 1.1


def measure_noise(repeat: int = 9) -> Section:
    ns = _take_turns(_samplers(), repeat)
    seeded = {"torch.normal": ns.pop("torch.normal"), "numpy standard_normal": ns.pop("numpy standard_normal")}
    beside = {"keystream": ns["keystream"], **seeded}
    rows = [
        Row("a million normals, added on the grid", ns["Gaussian on the grid"] * COUNT / 1e6, "ms", GOAL_MS),
        *(Row(what, value, "ns", beside=beside if what != "keystream" else {}) for what, value in ns.items()),
    ]
    return Section(
        "Noise",
        f"CPU time per parameter of one thread, {COUNT:,} parameters, median of {repeat}. Ours are cryptographic and "
        "safe in floating point; torch.normal (float32) and NumPy (float64) are seeded generators and neither.",
        rows,
    )


def _samplers() -> dict[str, Callable[[], object]]:
    import torch

    from privacy.discrete import discrete_gaussian, skellam
    from privacy.gaussian import add_gaussian, standard_normals
    from privacy.randomness import secure_stream

    torch.set_num_threads(1)
    stream, generator = secure_stream(), np.random.default_rng()
    words, values = np.empty(COUNT, np.uint64), np.zeros(COUNT, np.float32)
    return {
        "keystream": lambda: stream.fill(words),
        "Gaussian on the grid": lambda: add_gaussian(values, STD, stream, out=values),
        "standard normals": lambda: standard_normals(stream, COUNT),
        "discrete Gaussian, sigma 2^20": lambda: discrete_gaussian(stream, COUNT, SIGMA),
        "Skellam, sigma 2^20": lambda: skellam(stream, COUNT, SIGMA),
        "torch.normal": lambda: torch.normal(0.0, STD, (COUNT,)),
        "numpy standard_normal": lambda: generator.standard_normal(COUNT),
    }


def _take_turns(samplers: dict[str, Callable[[], object]], repeat: int) -> dict[str, float]:
    """Nanoseconds per parameter; one untimed turn first."""
    times: dict[str, list[float]] = {name: [] for name in samplers}
    for turn in range(repeat + 1):
        for name, sample in samplers.items():
            started = time.thread_time()
            sample()
            if turn > 0:
                times[name].append((time.thread_time() - started) * 1e9 / COUNT)
    return {name: median(values) for name, values in times.items()}


if __name__ == "__main__":
    print(describe_machine())
    print_section(measure_noise())
