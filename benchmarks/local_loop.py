"""What our local training loop costs over the loop that one would write by hand for the same work.

Both draw the same permutation and train their own copy of the same model; the weights they end with are compared.
They take turns, in random order, on one thread.
"""

import random
import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.machine import Row, Section
from client_app.local import LocalTrainer
from fedplat.job import validate_job
from fedplat.task import Examples, Task
from fedplat.tasks.digits import Digits
from fedplat.tasks.mnist import Mnist

RATIO_LIMIT = 1.1
LR = 0.01
NOWHERE = Path()
"""The tasks here are never asked for their data."""


@dataclass(frozen=True)
class Workload:
    name: str
    task: Task
    input_shape: tuple[int, ...]
    num_examples: int
    batch_size: int
    repeat: int

    @property
    def steps(self) -> int:
        return -(-self.num_examples // self.batch_size)

    def examples(self) -> Examples:
        generator = torch.Generator().manual_seed(0)
        inputs = torch.rand(self.num_examples, *self.input_shape, generator=generator)
        return Examples(inputs, torch.randint(0, 10, (self.num_examples,), generator=generator))


WORKLOADS = (
    Workload("digits MLP 64-128-10, 80 examples, batch 16", Digits(NOWHERE), (64,), 80, 16, 400),
    Workload("MNIST 2NN, 600 examples, batch 10", Mnist(NOWHERE), (1, 28, 28), 600, 10, 40),
    Workload("MNIST CNN, 600 examples, batch 10", Mnist(NOWHERE, "cnn"), (1, 28, 28), 600, 10, 40),
)


def measure_loop(repeat: int | None = None) -> Section:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rows = [row for workload in WORKLOADS for row in _measure(workload, repeat or workload.repeat)]
    finally:
        torch.set_num_threads(threads)
    return Section(
        "Local training loop",
        f"LocalTrainer beside a hand-written PyTorch loop (which keeps no metrics): one epoch of SGD, median CPU time "
        f"of {repeat or '400 (digits) or 40 (MNIST)'} turns, one thread; random examples.",
        rows,
    )


def by_hand(model: nn.Module, inputs: Tensor, targets: Tensor, batch_size: int, generator: torch.Generator) -> None:
    """The least that trains."""
    optimizer = torch.optim.SGD(model.parameters(), LR)
    for rows in torch.randperm(len(targets), generator=generator).split(batch_size):
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs[rows]), targets[rows]).backward()
        optimizer.step()


def _measure(workload: Workload, repeat: int) -> list[Row]:
    examples = workload.examples()
    torch.manual_seed(0)
    ours = workload.task.model()
    theirs = deepcopy(ours)
    job = validate_job({"local": {"batch_size": workload.batch_size}}, "benchmark")
    trainer = LocalTrainer(job, workload.task, ours, torch.device("cpu"))
    loops: dict[str, Callable[[torch.Generator], object]] = {
        "ours": lambda generator: trainer.train(examples, LR, generator),
        "by hand": lambda generator: by_hand(theirs, examples.inputs, examples.targets, workload.batch_size, generator),
    }
    _require_same_work(loops, ours, theirs)
    times = _take_turns(loops, repeat)
    steps_us = {name: 1e6 * seconds / workload.steps for name, seconds in times.items()}
    return [
        Row(f"{workload.name}: per step", steps_us["ours"], "µs", None, {"by hand": steps_us["by hand"]}),
        Row(f"{workload.name}: ratio", times["ours"] / times["by hand"], "×", RATIO_LIMIT),
    ]


def _require_same_work(
    loops: dict[str, Callable[[torch.Generator], object]], ours: nn.Module, theirs: nn.Module
) -> None:
    for loop in loops.values():
        loop(torch.Generator().manual_seed(0))
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def _take_turns(loops: dict[str, Callable[[torch.Generator], object]], repeat: int) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in loops}
    order, shuffle = list(loops), random.Random(0)
    for turn in range(repeat):
        shuffle.shuffle(order)
        for name in order:
            generator = torch.Generator().manual_seed(turn)
            started = time.process_time_ns()
            loops[name](generator)
            times[name].append((time.process_time_ns() - started) / 1e9)
    return {name: median(values) for name, values in times.items()}
