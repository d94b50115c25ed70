"""Measure a model on examples: mean loss and metrics. The same code at the server and at a client."""

from dataclasses import dataclass

import torch
from torch import nn

from fedplat.task import Examples, Task, example_losses

BATCH = 1024


@dataclass(frozen=True)
class Measurement:
    num_examples: int
    metrics: dict[str, float]


@torch.no_grad()
def evaluate(model: nn.Module, task: Task, examples: Examples, device: torch.device) -> Measurement:
    """Means over all examples, summed in double precision."""
    model.eval()
    sums: dict[str, float] = {}
    for start in range(0, len(examples), BATCH):
        batch = examples[slice(start, start + BATCH)]
        targets = batch.targets.to(device)
        outputs = model(batch.inputs.to(device))
        losses, parts = example_losses(task, outputs, targets)
        values = {"loss": losses, **parts, **task.metrics(outputs, targets)}
        for name, value in values.items():
            sums[name] = sums.get(name, 0.0) + float(value.double().sum())
    return Measurement(len(examples), {name: total / len(examples) for name, total in sums.items()})
