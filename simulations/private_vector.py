"""DP-SGD of many virtual clients at once: the mathematics of `client_app.dp_sgd`, client by client, in stacked
kernels.

Every client has its own Poisson batches (padded and masked, empty ones included), its own clip norm and independent
noise; all take the same number of steps, because that number is public. For plain MLPs an example's norm comes from
activations and output gradients; other models go through per-example gradients of vmap. However they were formed
(`client_app.weighted_sums`), sums are kept in float64 until the noise is in them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from client_app.clipping import NORM_MARGIN
from client_app.dp_sgd import ROUNDING_MARGIN, Randomness, sample_batch
from client_app.weighted_sums import LARGEST_SQUARE, SMALLEST_WEIGHT, may_use_fp32
from fedplat.job import Job
from fedplat.task import Examples, Task, example_losses
from privacy.clip_norm import next_clip_norm, noisy_share
from privacy.gaussian import add_gaussian
from simulations.stacked_mlp import Layers, Stack, is_plain_mlp, layers_of
from simulations.stacked_mlp import backward as mlp_backward
from simulations.stacked_mlp import forward as mlp_forward
from simulations.vector import ClientPlan, StackOptimizer, StackResult, augment_stack, own_augment

if TYPE_CHECKING:
    from privacy.plan import PrivacyPlan

MOST_ELEMENTS = 1 << 25
"""Per-example gradients of one step of a stack (128 MB): more clients than that go one by one."""


@dataclass(frozen=True)
class StackBatch:
    """The examples of one step: all clients' rows one after another, where each client's begin, and how many it has."""

    rows: Tensor
    starts: np.ndarray
    sizes: np.ndarray

    def padded(self) -> tuple[Tensor, Tensor]:
        """Rows as a rectangle, and which are real. Padding is whatever row comes next: its weight is zero."""
        places = np.arange(int(self.sizes.max()))
        index = np.minimum(self.starts[:, None] + places, len(self.rows) - 1)
        mask = torch.from_numpy(places < self.sizes[:, None]).float()
        return self.rows[torch.from_numpy(index)], mask


class PrivateStackTrainer:
    """Trains stacks of clients of one private job, starting from the resident model's parameters."""

    def __init__(self, job: Job, plan: "PrivacyPlan", task: Task, model: nn.Module, examples: Examples) -> None:
        self._job, self._plan, self._task, self._model, self._examples = job, plan, task, model, examples
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        layers = layers_of(model)
        self._layers: Layers | None = layers if is_plain_mlp(layers) else None
        self._augment = own_augment(task)
        self._per_example = None if self._layers is not None else _per_example_gradients(model, task)

    def train(
        self, plans: list[ClientPlan], randomness: Sequence[Randomness], clip_norm: float
    ) -> tuple[StackResult, list[float]]:
        """All clients' new parameters, and the clip norms they reached.

        `randomness` has one entry per client, or a single one that serves the whole stack.
        """
        stack = {name: p.detach().expand(len(plans), *p.shape).clone() for name, p in self._parameters.items()}
        optimizer = StackOptimizer(self._job, stack, torch.tensor([plan.lr for plan in plans]))
        flat = torch.zeros(len(plans), sum(p.numel() for p in self._parameters.values()), dtype=torch.float64)
        gradients = torch.zeros(flat.shape)
        clip_norms = torch.full((len(plans),), clip_norm)
        rows = torch.cat([plan.rows for plan in plans])
        sizes = np.array([len(plan.rows) for plan in plans])
        for _ in range(self._plan.steps):
            batch = self._sample(rows, sizes, randomness)
            below = self._clipped_sums(stack, plans, batch, clip_norms, flat)
            self._add_noise(flat, randomness, clip_norms, gradients)
            with torch.no_grad():
                optimizer.step(self._split(gradients), len(plans))
            clip_norms = self._adapted(clip_norms, below, batch.sizes, randomness)
        return StackResult(stack, [self._plan.steps] * len(plans)), [float(c) for c in clip_norms]

    def _sample(self, rows: Tensor, sizes: np.ndarray, randomness: Sequence[Randomness]) -> "StackBatch":
        """Each client's Poisson batch; `rows` are all clients' rows of the training data, one after another."""
        ends = np.cumsum(sizes)
        if len(randomness) == 1 and self._plan.section.max_batch is None:
            # One draw over everybody's rows is as good as one per client: rows are independent.
            chosen = randomness[0].sampling.uniform_rows(int(ends[-1]), self._plan.sample_rate)
        else:
            streams = [randomness[i if len(randomness) > 1 else 0].sampling for i in range(len(sizes))]
            own = [sample_batch(stream, int(size), self._plan) for stream, size in zip(streams, sizes, strict=True)]
            chosen = np.concatenate([part + end - size for part, end, size in zip(own, ends, sizes, strict=True)])
        cuts = np.concatenate([[0], np.searchsorted(chosen, ends)])
        return StackBatch(rows[torch.from_numpy(chosen)], cuts[:-1], np.diff(cuts))

    def _clipped_sums(
        self, stack: Stack, plans: list[ClientPlan], batch: "StackBatch", clip_norms: Tensor, flat: Tensor
    ) -> Tensor:
        """Each client's sum of clipped gradients into its row of `flat`; returns how many norms were within."""
        if len(batch.rows) == 0:
            flat.zero_()
            return torch.zeros(len(plans))
        rows, mask = batch.padded()
        inputs, targets = self._examples.inputs[rows], self._examples.targets[rows]
        if self._augment is not None:
            sizes = torch.from_numpy(batch.sizes)
            inputs = augment_stack(self._augment, inputs, sizes, [plan.generator for plan in plans])
        if self._layers is not None:
            return self._mlp_sums(self._layers, stack, inputs, targets, mask, clip_norms, flat)
        return self._vmap_sums(stack, inputs, targets, mask, clip_norms, flat)

    def _mlp_sums(
        self,
        layers: Layers,
        stack: Stack,
        inputs: Tensor,
        targets: Tensor,
        mask: Tensor,
        clip_norms: Tensor,
        flat: Tensor,
    ) -> Tensor:
        with torch.no_grad():
            activations = mlp_forward(layers, stack, inputs)
        outputs = activations[-1].flatten(0, 1).requires_grad_()
        losses, _ = example_losses(self._task, outputs, targets.flatten(0, 1))
        (gradient,) = torch.autograd.grad(losses.sum(), outputs)
        factors_of: dict[str, tuple[Tensor, Tensor]] = {}
        with torch.no_grad():
            gradient = gradient.reshape(activations[-1].shape)
            mlp_backward(
                layers, stack, activations, gradient, lambda name, left, right: _keep(factors_of, name, left, right)
            )
            squares, bounded = torch.zeros(mask.shape, dtype=torch.float64), True
            for left, right in factors_of.values():
                of_left, of_right = _square_norms(left, 1), _square_norms(right, 2)
                squares += of_left * of_right
                bounded = bounded and bool(torch.maximum(of_left, of_right).max() < LARGEST_SQUARE)
            weights, below = _weights(squares, mask, clip_norms)
            dtype = _sum_type(weights, clip_norms) if bounded else torch.float64
            finite = squares.isfinite()
            for name, view in self._split(flat).items():
                left, right = factors_of[name]
                if not bool(finite.all()):  # 0 · NaN is NaN: such examples leave the product
                    left = torch.where(finite.unsqueeze(1), left, 0.0)
                    right = torch.where(finite.unsqueeze(2), right, 0.0)
                scaled = left.to(dtype) * weights.to(dtype).unsqueeze(1)
                view.copy_(torch.bmm(scaled, right.to(dtype)).reshape(view.shape))
        return below

    def _vmap_sums(
        self, stack: Stack, inputs: Tensor, targets: Tensor, mask: Tensor, clip_norms: Tensor, flat: Tensor
    ) -> Tensor:
        assert self._per_example is not None
        gradients = self._per_example(stack, inputs, targets)
        squares = torch.stack([_square_norms(g.flatten(2), 2) for g in gradients.values()]).sum(0)
        weights, below = _weights(squares, mask, clip_norms)
        weights = weights.to(_sum_type(weights, clip_norms))
        for name, view in self._split(flat).items():
            rows = torch.where(squares.isfinite().unsqueeze(2), gradients[name].flatten(2), 0.0)
            view.copy_(torch.bmm(weights.unsqueeze(1), rows.to(weights.dtype)).reshape(view.shape))
        return below

    def _split(self, flat: Tensor) -> Stack:
        views, start = {}, 0
        for name, parameter in self._parameters.items():
            views[name] = flat[:, start : start + parameter.numel()].unflatten(1, parameter.shape)
            start += parameter.numel()
        return views

    def _add_noise(self, flat: Tensor, randomness: Sequence[Randomness], clip_norms: Tensor, gradients: Tensor) -> None:
        """Independent noise for every client and coordinate, then the public normaliser: the clients' gradients."""
        noise = self._plan.update_noise * (1 + ROUNDING_MARGIN)
        if len(randomness) == 1 and self._plan.section.adaptive is None:
            everything = flat.view(-1).numpy()
            add_gaussian(everything, noise * float(clip_norms[0]), randomness[0].noise, out=everything)
        else:
            for client, row in enumerate(flat.numpy()):
                stream = randomness[client if len(randomness) > 1 else 0].noise
                add_gaussian(row, noise * float(clip_norms[client]), stream, out=row)
        torch.mul(flat, 1 / self._plan.normaliser, out=gradients)

    def _adapted(
        self, clip_norms: Tensor, below: Tensor, sizes: np.ndarray, randomness: Sequence[Randomness]
    ) -> Tensor:
        adaptive, count_noise = self._plan.section.adaptive, self._plan.count_noise
        if adaptive is None or count_noise is None:
            return clip_norms
        moved = []
        for client, size in enumerate(sizes):
            stream = randomness[client if len(randomness) > 1 else 0].counts
            share = noisy_share(float(below[client]), int(size), self._plan.normaliser, count_noise, stream)
            moved.append(next_clip_norm(float(clip_norms[client]), share, adaptive))
        return torch.tensor(moved)


def _keep(found: dict[str, tuple[Tensor, Tensor]], name: str, left: Tensor, right: Tensor) -> None:
    found[name] = (left, right)


def _square_norms(tensor: Tensor, dim: int) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(tensor, dim=dim, dtype=torch.float64)
    return norms.square_()


def _weights(squares: Tensor, mask: Tensor, clip_norms: Tensor) -> tuple[Tensor, Tensor]:
    """Each example's clip factor (0 for padding and for gradients that are not finite), and how many were within."""
    norms = squares.sqrt()
    real = (mask > 0) & norms.isfinite()
    limits = clip_norms.unsqueeze(1)
    factors = (limits / (norms * (1 + NORM_MARGIN) + 1e-12)).clamp(max=1.0)
    return torch.where(real, factors, 0.0), (real & (norms <= limits)).sum(1).float()


def _sum_type(weights: Tensor, clip_norms: Tensor) -> torch.dtype:
    """fp32 where `client_app.weighted_sums` bounds the error of every client's sum, float64 elsewhere."""
    examples, extremes = weights.shape[1], (float(clip_norms.min()), float(clip_norms.max()))
    fits = all(may_use_fp32(examples, clip_norm, weights.device) for clip_norm in extremes)
    fits = fits and bool(((weights == 0) | (weights > SMALLEST_WEIGHT)).all())
    return torch.float32 if fits else torch.float64


def _per_example_gradients(model: nn.Module, task: Task) -> Any:
    """(stacked parameters, inputs, targets) → gradients of shape [clients, examples, …] by name."""
    from torch.func import functional_call, grad, vmap

    def loss(parameters: Stack, inputs: Tensor, target: Tensor) -> Tensor:
        outputs = functional_call(model, parameters, (inputs.unsqueeze(0),))
        losses, _ = example_losses(task, outputs, target.unsqueeze(0))
        return losses.squeeze(0)

    return vmap(vmap(grad(loss), in_dims=(None, 0, 0)), in_dims=(0, 0, 0))
