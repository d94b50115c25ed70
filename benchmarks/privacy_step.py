"""A DP-SGD step over the non-private step of the same model, beside Opacus's four modes; and its memory.

All contenders take turns on the same fixed batch in one process. CPU time on one thread says what clipping costs. Wall
time of many steps in a row, with noise, says what a user waits for: our noise is made ahead on another core, and in a
row it has no time to make it during the turns of others.
"""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from torch.nn import functional

from benchmarks.machine import Row, Section, describe_machine, print_section
from benchmarks.private_models import CLIP, LR, MOMENTUM, OPACUS_MODES, SUBJECTS, Subject, opacus_step, plain_step
from client_app.clipping import ClippedSum
from client_app.dp_sgd import PrivateTrainer, RandomnessSource
from fedplat.job import validate_job
from fedplat.task import Examples
from fedplat.tasks.mnist import Mnist
from privacy.plan import plan_privacy

BATCHES = (64, 256)
NOISE = 1.0
CLIPPING_LIMIT = 1.6
UNTIMED, BLOCK_S = 3, 0.4


def clipping_step(subject: Subject, size: int) -> Callable[[], None]:
    """Our clipped sum and a step, without noise."""
    model, (inputs, targets) = subject.model(), subject.batch(size)
    clipped = ClippedSum(model)
    for parameter, gradient in clipped.gradients().items():
        parameter.grad = gradient
    optimizer = torch.optim.SGD(model.parameters(), LR, momentum=MOMENTUM)

    def step() -> None:
        clipped.reset(size, CLIP)
        for rows in torch.arange(size).split(clipped.micro_batch):
            whole = len(rows) == size
            xs, ys = (inputs, targets) if whole else (inputs[rows], targets[rows])
            clipped.add(lambda x=xs, y=ys: functional.cross_entropy(model(x), y, reduction="none"), CLIP)  # type: ignore[misc]
        torch.mul(clipped.total, 1 / size, out=clipped.flat)
        optimizer.step()

    return step


def private_step(subject: Subject, size: int) -> Callable[[], None]:
    """The step of our trainer, noise included."""
    job = validate_job(
        {
            "local": {"batch_size": size, "steps": 1},
            "privacy": {"unit": "sample", "noise_multiplier": NOISE, "clip_norm": CLIP, "sample_rate": 0.01},
        },
        "benchmark",
    )
    plan = plan_privacy(job)
    assert plan is not None
    model, (inputs, targets) = subject.model(), subject.batch(size)
    trainer = PrivateTrainer(job, plan, Mnist(Path()), model, torch.device("cpu"))
    noise = RandomnessSource(plan, trainer.num_parameters).streams(0, [])[0].noise
    trainer.attach_gradients()
    optimizer = torch.optim.SGD(model.parameters(), LR, momentum=MOMENTUM)
    examples, rows, generator = Examples(inputs, targets), torch.arange(size), torch.Generator()

    def step() -> None:
        trainer.noisy_gradient(examples, rows, generator, noise, CLIP)
        optimizer.step()

    return step


def _take_turns(contenders: dict[str, Callable[[], None]], repeat: int, clock: Callable[[], float]) -> dict[str, float]:
    """Median milliseconds; two untimed turns first."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(repeat + 2):
        for name, step in contenders.items():
            started = clock()
            step()
            if turn > 1:
                times[name].append((clock() - started) * 1e3)
    return {name: median(values) for name, values in times.items()}


def _in_a_row(contenders: dict[str, Callable[[], None]], blocks: int = 3) -> dict[str, float]:
    """Milliseconds per step of many in a row, each contender with the number of threads that suits it best."""
    times: dict[str, dict[int, list[float]]] = {name: {1: [], 2: []} for name in contenders}
    for _ in range(blocks):
        for name, step in contenders.items():
            for threads, found in times[name].items():
                torch.set_num_threads(threads)
                for _ in range(UNTIMED):  # uses up what noise was made ahead
                    step()
                started, steps = time.perf_counter(), 0
                while time.perf_counter() - started < BLOCK_S:
                    step()
                    steps += 1
                found.append((time.perf_counter() - started) / steps * 1e3)
    return {name: min(median(found) for found in by_threads.values()) for name, by_threads in times.items()}


def measure_clipping() -> Section:
    """CPU time of clipping alone."""
    torch.set_num_threads(1)
    rows = []
    for subject in SUBJECTS:
        for size in BATCHES:
            contenders = {"plain": plain_step(subject, size), "ours": clipping_step(subject, size)}
            contenders |= {mode: opacus_step(subject, size, mode, 0.0) for mode in _modes(subject, size)}
            found = _take_turns(contenders, subject.repeat, time.process_time)
            beside = {f"Opacus {mode}": found[mode] / found["plain"] for mode in OPACUS_MODES if mode in found}
            beside["plain ms"] = found["plain"]
            what = f"{subject.name}, batch {size}: clipping over the non-private step"
            rows.append(Row(what, found["ours"] / found["plain"], "×", limit=CLIPPING_LIMIT, beside=beside))
    how = "CPU time of forward, backward, clipped sum and SGD step, noise 0, one thread, median of 5–15 turns."
    return Section("Clipping", how, rows)


def _modes(subject: Subject, size: int) -> tuple[str, ...]:
    """Opacus's modes that form batch × parameters gradients of an MLP take gigabytes: once is enough to see it."""
    return ("hooks", "ghost") if subject.name == "MLP 1.86M" and size == 256 else OPACUS_MODES


def measure_step() -> Section:
    """Wall time of a whole step with noise."""
    rows = []
    for subject in SUBJECTS:
        for size in BATCHES:
            contenders = {"plain": plain_step(subject, size), "ours": private_step(subject, size)}
            modes = ("ghost",) if subject.name.startswith("MLP") else ("hooks", "ew", "ghost")
            contenders |= {mode: opacus_step(subject, size, mode, NOISE) for mode in modes}
            found = _in_a_row(contenders)
            best = min(modes, key=lambda mode: found[mode])
            goal = 1.5 if subject.name.startswith("MLP") else 1.0
            beside = {"ours ms": found["ours"], f"Opacus {best} ms": found[best], "non-private ms": found["plain"]}
            what = f"{subject.name}, batch {size}: Opacus's best mode over ours, whole step"
            rows.append(Row(what, found[best] / found["ours"], "×", at_least=goal, beside=beside))
    how = (
        f"Wall time with noise 1.0, steps in a row for {BLOCK_S} s, median of 3, each with the better of 1 and 2 "
        "threads. Opacus draws its noise from torch's generator, ours is from AES and on a grid; on the MLPs its best "
        "is ghost."
    )
    return Section("Whole DP step", how, rows)


def measure_memory() -> Section:
    """Peak memory by batch size, each in a process of its own."""
    rows = []
    base = _peak("plain", 64)
    for name, sizes in (("ours", (64, 256, 1024)), ("ghost", (64, 256)), ("hooks", (64, 256))):
        for size in sizes:
            value = _peak(name, size) - base
            label = "ours" if name == "ours" else f"Opacus {name}"
            rows.append(Row(f"MLP 1.86M, batch {size}, {label}: above a non-private step of 64", value, "MB"))
    how = "Largest resident set of a process that takes three steps; a gradient per example would be 7.5 MB each."
    return Section("Memory", how, rows)


def _peak(name: str, size: int) -> float:
    output = subprocess.run(
        [sys.executable, "-m", "benchmarks.privacy_step", name, str(size)], capture_output=True, text=True, check=True
    )
    return float(output.stdout.split()[-1])


def _print_peak(name: str, size: int) -> None:
    torch.set_num_threads(1)
    subject = SUBJECTS[1]
    match name:
        case "plain":
            step = plain_step(subject, size)
        case "ours":
            step = private_step(subject, size)
        case mode:
            step = opacus_step(subject, size, mode, NOISE)
    for _ in range(3):
        step()
    # Not getrusage: its maximum is inherited from the process that started this one.
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    print(int(status.split("VmHWM:")[1].split()[0]) / 1024)


if __name__ == "__main__":
    if len(sys.argv) == 3:
        _print_peak(sys.argv[1], int(sys.argv[2]))
    else:
        print(describe_machine())
        for measure in (measure_clipping, measure_step, measure_memory):
            print_section(measure())
