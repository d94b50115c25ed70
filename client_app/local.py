"""Local training: the loop that a client runs on its own examples.

One *step* is one optimiser update from `accumulate` batches. Losses are per example, and every
micro-batch is divided by the number of examples in its whole step, so accumulation changes memory,
not mathematics. Order: backward, proximal term, clip, correction (SCAFFOLD), update with weight decay.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedplat.job import Job
from fedplat.job_sections import LocalSection
from fedplat.task import Examples, Task, example_losses

LEAST_SCALE = 2.0**-10
"""Below this a gradient that still overflows is infinite in truth; the update check will refuse the result."""
Corrections = Sequence[tuple[nn.Parameter, Tensor]]
"""What is added to the gradient of each of these parameters in every step, after clipping."""
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
        self._shares: dict[tuple[int, int, torch.dtype], Tensor] = {}

    def train(
        self, examples: Examples, lr: float, generator: torch.Generator, corrections: Corrections = ()
    ) -> LocalResult:
        """Train the model in place on the examples, starting from its current weights."""
        local = self._job.local
        anchor = [p.detach().clone() for p in self._parameters] if self._job.proximal_mu else []
        optimizer = make_optimizer(local, self._parameters, lr)
        scaler = torch.amp.GradScaler(self._device.type, init_scale=2.0**12, enabled=local.precision == "fp16")
        sums = _RunningMeans()
        steps = 0
        for rows in step_batches(len(examples), local.batch_size * local.accumulate, local, generator):
            # In fp16 a step whose gradient overflowed is repeated at a lower scale, never just left out.
            while not self._step(examples, rows, generator, optimizer, scaler, anchor, corrections, sums):
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
        corrections: Corrections,
        sums: "_RunningMeans",
    ) -> bool:
        """One optimiser step on the given rows; False if the gradient overflowed and nothing was updated."""
        for parameter in self._parameters:
            parameter.grad = None  # what optimizer.zero_grad() does, for 5 µs less
        # Most steps are one batch: splitting it again would make a view for nothing.
        for micro in (rows,) if self._job.local.accumulate == 1 else rows.split(self._job.local.batch_size):
            losses = self._micro_batch(examples, micro, generator, sums)
            scaler.scale(losses).backward(self._share(losses, len(rows)))
        scale = scaler.get_scale()
        self._finish_step(optimizer, scaler, anchor, corrections)
        return scaler.get_scale() >= scale or scale < LEAST_SCALE

    def _share(self, losses: Tensor, count: int) -> Tensor:
        """The gradient of losses.sum() / count, without the two graph nodes that would compute it."""
        key = (len(losses), count, losses.dtype)
        if key not in self._shares:
            self._shares[key] = torch.full_like(losses, 1 / count)
        return self._shares[key]

    def _micro_batch(
        self, examples: Examples, rows: Tensor, generator: torch.Generator, sums: "_RunningMeans"
    ) -> Tensor:
        """The loss of each example of one micro-batch."""
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
        sums.add("loss", losses)
        for name, part in parts.items():
            sums.add(name, part)
        return losses

    def _finish_step(
        self,
        optimizer: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler,
        anchor: list[Tensor],
        corrections: Corrections,
    ) -> None:
        local = self._job.local
        if anchor or corrections or local.clip_norm is not None:
            scaler.unscale_(optimizer)
        for parameter, start in zip(self._parameters, anchor, strict=False):
            if parameter.grad is not None:
                parameter.grad.add_(parameter.detach() - start, alpha=self._job.proximal_mu)
        if local.clip_norm is not None:
            nn.utils.clip_grad_norm_(self._parameters, local.clip_norm)
        for parameter, correction in corrections:
            # A parameter that this client's loss doesn't touch has the gradient 0, and is corrected like any other.
            parameter.grad = correction.clone() if parameter.grad is None else parameter.grad.add_(correction)
        scaler.step(optimizer)
        scaler.update()


_FOLD = 256
"""Batches whose losses are kept before they are summed: one small kernel per batch would cost 5 µs each."""


class _RunningMeans:
    """Means of per-example values, kept as tensors: reading a value out after every step would stall a GPU."""

    def __init__(self) -> None:
        self._pending: dict[str, list[Tensor]] = {}
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, int] = {}

    def add(self, name: str, values: Tensor) -> None:
        pending = self._pending.setdefault(name, [])
        pending.append(values.detach())
        if len(pending) >= _FOLD:
            self._fold(name)

    def _fold(self, name: str) -> None:
        values = torch.cat(self._pending.pop(name))
        total = values.sum(dtype=torch.float64)
        self._sums[name] = self._sums[name] + total if name in self._sums else total
        self._counts[name] = self._counts.get(name, 0) + len(values)

    def means(self) -> dict[str, float]:
        for name in list(self._pending):
            self._fold(name)
        return {name: float(total) / self._counts[name] for name, total in self._sums.items()}
