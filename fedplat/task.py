"""A task: what is learned. Model, loss, metrics and data, in one small class.

Losses and metrics are given per example, as tensors of shape [batch]. Averaging is fedplat's
business: that is what lets the same task run with gradient accumulation, with padded batches of
many clients at once, and with per-example clipping under differential privacy.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from fedplat.errors import FedplatError, UsageError

Split = Literal["train", "test"]


@dataclass(frozen=True)
class Examples:
    """A table of examples: row i of every column belongs to example i."""

    inputs: Tensor
    targets: Tensor
    labels: np.ndarray | None = None
    """One integer per example for label-skew partitioning; default: the targets, if they are integers."""
    keys: tuple[str, ...] | None = None
    """Whom each example is about (patient, user), for partitioning by key."""

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, rows: Tensor | slice) -> "Examples":
        """The chosen rows; labels and keys are for partitioning only and stay behind."""
        return Examples(self.inputs[rows], self.targets[rows])

    def partition_labels(self) -> np.ndarray | None:
        if self.labels is not None:
            return np.asarray(self.labels)
        is_class = self.targets.dim() == 1 and not self.targets.is_floating_point()
        return self.targets.numpy() if is_class else None


class Task(Protocol):
    """What a job trains. Subclass it, or write any class with these methods.

    The constructor takes `data_dir: Path` (where the data files are) and whatever arguments the
    job file may set under [task.args].
    """

    loss_weights: Mapping[str, float] = {}
    """Weights of named losses for a multi-task `loss`; a loss without a weight counts once."""

    def model(self) -> nn.Module:
        """A freshly initialised model."""
        ...

    def data(self, split: Split) -> Examples:
        """All training examples, or the public test set for evaluation at the server."""
        ...

    def loss(self, outputs: Any, targets: Tensor) -> Tensor | Mapping[str, Tensor]:
        """Loss of each example, shape [batch]; or several named ones (multi-task)."""
        ...

    def metrics(self, outputs: Any, targets: Tensor) -> Mapping[str, Tensor]:
        """Named per-example values of shape [batch]; their means are reported."""
        ...

    def augment(self, inputs: Tensor, generator: torch.Generator) -> Tensor:
        """Data augmentation of a training batch; draw only from `generator`."""
        return inputs


def example_losses(task: Task, outputs: Any, targets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The training loss of each example, and its named parts where the task has several."""
    losses = task.loss(outputs, targets)
    if isinstance(losses, Tensor):
        return losses, {}
    weights = getattr(task, "loss_weights", {})
    total = sum(weights.get(name, 1.0) * loss for name, loss in losses.items())
    if not isinstance(total, Tensor):
        raise UsageError("task.loss returned no losses: return a tensor or a non-empty mapping")
    return total, dict(losses)


_REQUIRED = ("model", "data", "loss", "metrics")


def require_protocol(task: object, name: str) -> None:
    """Refuse a class that lacks a part of the protocol, naming what is missing."""
    missing = [method for method in _REQUIRED if not _is_written(task, method)]
    if missing:
        raise UsageError(
            f"task {name}: missing {', '.join(f'{m}()' for m in missing)}. A task has "
            f"{', '.join(f'{m}()' for m in _REQUIRED)}; see docs/tasks.md"
        )


def _is_written(task: object, method: str) -> bool:
    """Present, and not merely the protocol's own placeholder that a subclass inherits."""
    found = getattr(task, method, None)
    return callable(found) and getattr(found, "__func__", found) is not getattr(Task, method)


def load_examples(task: Task, name: str, split: Split) -> Examples:
    """The task's data, checked; what goes wrong in somebody's own code is said in one sentence."""
    try:
        examples = task.data(split)
    except FedplatError:
        raise
    except Exception as error:
        raise UsageError(f"task {name}: data('{split}') failed: {type(error).__name__}: {error}") from error
    if not isinstance(examples, Examples):
        raise UsageError(f"task {name}: data('{split}') must return Examples, got {type(examples).__name__}")
    if len(examples.inputs) != len(examples.targets) or len(examples) == 0:
        lengths = f"{len(examples.inputs)} inputs, {len(examples.targets)} targets"
        raise UsageError(f"task {name}: data('{split}') has {lengths}: give as many of each, at least one")
    return examples


def rehearse(task: Task, name: str, examples: Examples) -> set[str]:
    """Run two examples through augmentation, model, loss and metrics; refuse shapes that training could not use.

    Returns the names of what the task measures.
    """
    few = examples[slice(0, 2)]
    try:
        with torch.no_grad():
            model = task.model().eval()
            augment = getattr(task, "augment", None)
            inputs = augment(few.inputs, torch.Generator().manual_seed(0)) if augment else few.inputs
            outputs = model(inputs)
            losses, parts = example_losses(task, outputs, few.targets)
            values = {"loss": losses, **parts, **task.metrics(outputs, few.targets)}
    except UsageError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise UsageError(f"task {name}: failed on its first two examples: {reason}") from error
    for part, value in values.items():
        if not isinstance(value, Tensor) or value.shape != (len(few),):
            shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise UsageError(
                f"task {name}: '{part}' must have one value per example, shape ({len(few)},), got {shape}. "
                "Use reduction='none' in the loss; fedplat takes the mean"
            )
    return set(values)
