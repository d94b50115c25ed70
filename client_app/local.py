"""Local training: the loop that a client runs on its own examples.

One *step* is one optimiser update from `accumulate` batches. Losses are per example, and every
micro-batch is divided by the number of examples in its whole step, so accumulation changes memory,
not mathematics. Order: backward, proximal term, clip, update.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedplat.job import Job
from fedplat.job_sections import LocalSection
from fedplat.task import Examples, Task, example_losses

LEAST_SCALE = 2.0**-10
"""Below this a gradient that still overflows is infinite in truth; the update check will refuse the result."""
_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class LocalResult:
    steps: int
    metrics: dict[str, float]
    """Means over all examples seen in training, as the model was when it saw them."""


def make_optimizer(local: LocalSection, parameters: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    match local.optimizer:
        case "sgd":
            return torch.optim.SGD(parameters, lr, momentum=local.momentum, weight_decay=local.weight_decay)
        case "adam":
            return torch.optim.Adam(parameters, lr, weight_decay=local.weight_decay)
        case "adamw":
            return torch.optim.AdamW(parameters, lr, weight_decay=local.weight_decay)


def step_batches(size: int, step_size: int, local: LocalSection, generator: torch.Generator) -> Iterator[Tensor]:
    """Row numbers of each step, reshuffled every epoch, until the job's limit is reached."""
    limit_steps = local.steps
    deadline = time.monotonic() + local.seconds if local.seconds is not None else None
    epochs = (local.epochs or 1) if limit_steps is None and deadline is None else None
    done, epoch = 0, 0
    while epochs is None or epoch < epochs:
        for rows in torch.randperm(size, generator=generator).split(step_size):
            if limit_steps is not None and done >= limit_steps:
                return
            if deadline is not None and time.monotonic() >= deadline and done > 0:
                return
            yield rows
            done += 1
        epoch += 1


class LocalTrainer:
    """Trains one resident model for one client after another."""

    def __init__(self, job: Job, task: Task, model: nn.Module, device: torch.device) -> None:
        self._job, self._task, self._model, self._device = job, task, model, device
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._augment = getattr(task, "augment", None)

    def train(self, examples: Examples, lr: float, generator: torch.Generator) -> LocalResult:
        """Train the model in place on the examples, starting from its current weights."""
        local = self._job.local
        anchor = [p.detach().clone() for p in self._parameters] if self._job.proximal_mu else []
        optimizer = make_optimizer(local, self._parameters, lr)
        scaler = torch.amp.GradScaler(self._device.type, init_scale=2.0**12, enabled=local.precision == "fp16")
        sums = _RunningMeans()
        steps = 0
        for rows in step_batches(len(examples), local.batch_size * local.accumulate, local, generator):
            # In fp16 a step whose gradient overflowed is repeated at a lower scale, never just left out.
            while not self._step(examples, rows, generator, optimizer, scaler, anchor, sums):
                pass
            steps += 1
        return LocalResult(steps, sums.means())

    def _step(
        self,
        examples: Examples,
        rows: Tensor,
        generator: torch.Generator,
        optimizer: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler,
        anchor: list[Tensor],
        sums: "_RunningMeans",
    ) -> bool:
        """One optimiser step on the given rows; False if the gradient overflowed and nothing was updated."""
        optimizer.zero_grad(set_to_none=True)
        for micro in rows.split(self._job.local.batch_size):
            loss = self._micro_batch(examples, micro, generator, sums)
            scaler.scale(loss / len(rows)).backward()
        scale = scaler.get_scale()
        self._finish_step(optimizer, scaler, anchor)
        return scaler.get_scale() >= scale or scale < LEAST_SCALE

    def _micro_batch(
        self, examples: Examples, rows: Tensor, generator: torch.Generator, sums: "_RunningMeans"
    ) -> Tensor:
        """Sum of the losses of one micro-batch."""
        batch = examples[rows]
        inputs = self._augment(batch.inputs, generator) if self._augment else batch.inputs
        inputs, targets = inputs.to(self._device), batch.targets.to(self._device)
        precision = _AUTOCAST.get(self._job.local.precision)
        if precision is None:
            outputs = self._model(inputs)
            losses, parts = example_losses(self._task, outputs, targets)
        else:
            with torch.autocast(self._device.type, dtype=precision):
                outputs = self._model(inputs)
                losses, parts = example_losses(self._task, outputs, targets)
        loss = losses.sum()
        sums.add(len(rows), {"loss": loss} | {name: part.sum() for name, part in parts.items()})
        return loss

    def _finish_step(
        self, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, anchor: list[Tensor]
    ) -> None:
        local = self._job.local
        if anchor or local.clip_norm is not None:
            scaler.unscale_(optimizer)
        for parameter, start in zip(self._parameters, anchor, strict=False):
            if parameter.grad is not None:
                parameter.grad.add_(parameter.detach() - start, alpha=self._job.proximal_mu)
        if local.clip_norm is not None:
            nn.utils.clip_grad_norm_(self._parameters, local.clip_norm)
        scaler.step(optimizer)
        scaler.update()


class _RunningMeans:
    """Per-example sums, kept as tensors: reading a value out after every step would stall a GPU."""

    def __init__(self) -> None:
        self._count = 0
        self._sums: dict[str, Tensor] = {}

    def add(self, count: int, values: dict[str, Tensor]) -> None:
        self._count += count
        for name, value in values.items():
            detached = value.detach().double()
            self._sums[name] = self._sums[name] + detached if name in self._sums else detached

    def means(self) -> dict[str, float]:
        return {name: float(total) / self._count for name, total in self._sums.items()}
