"""Measure a model on examples: mean loss and metrics. The same code at the server and at a client."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedplat.task import Examples, Task, example_losses

BATCH = 1024


@dataclass(frozen=True)
class Measurement:
    num_examples: int
    metrics: dict[str, float]


def evaluate(model: nn.Module, task: Task, examples: Examples, device: torch.device) -> Measurement:
    """Means over all examples, summed in double precision."""
    sums: dict[str, float] = {}
    for values in _batches(model, task, examples, device):
        for name, value in values.items():
            sums[name] = sums.get(name, 0.0) + float(value.double().sum())
    return Measurement(len(examples), {name: total / len(examples) for name, total in sums.items()})


def example_values(model: nn.Module, task: Task, examples: Examples, device: torch.device) -> dict[str, Tensor]:
    """Loss and metrics of each example."""
    batches = list(_batches(model, task, examples, device))
    return {name: torch.cat([values[name] for values in batches]) for name in (batches[0] if batches else {})}


@torch.no_grad()
def _batches(model: nn.Module, task: Task, examples: Examples, device: torch.device) -> Iterator[dict[str, Tensor]]:
    model.eval()
    for start in range(0, len(examples), BATCH):
        batch = examples[slice(start, start + BATCH)]
        targets = batch.targets.to(device)
        outputs = model(batch.inputs.to(device))
        losses, parts = example_losses(task, outputs, targets)
        yield {"loss": losses, **parts, **task.metrics(outputs, targets)}
