"""Per-example clipping with one backward pass: Σᵢ min(1, C/‖gᵢ‖)·gᵢ without ever forming all the gᵢ.

Book-keeping (Bu et al. 2023, "Differentially private optimization on large model at small cost"): differentiate only
with respect to the *outputs* of layers, get each example's gradient norm from a layer's input and output gradient
(`client_app.layer_gradients`), then form the clipped sum once, as one matrix product per layer.

Invariants: an example whose gradient has a NaN or an infinity contributes exactly nothing; every other example
contributes a vector of norm ≤ C; all trainable parameters count in the norm, whatever layer they are in. Norms are
taken in float64. So are sums, but for steps of few examples, where `client_app.weighted_sums` proves that fp32 does.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from client_app.layer_gradients import Kernel, kernel_for
from client_app.weighted_sums import SMALLEST_WEIGHT, may_use_fp32
from fedplat.errors import UsageError

NORM_MARGIN = 1e-5
"""Clip a little below C, so that rounding doesn't lift a contribution above it."""
KEPT_ELEMENTS = 1 << 23
"""Numbers that kernels keep between norm and sum (32 MB), whatever the batch."""
LARGEST_MICRO_BATCH = 4096


@dataclass
class _Call:
    """One application of a layer in the current forward pass."""

    kernel: Kernel
    inputs: Tensor
    edge: GradientEdge


class ClippedSum:
    """The running sum of clipped gradients of one logical step, in one flat vector."""

    def __init__(self, model: nn.Module) -> None:
        self._named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._parameters = list(self._named.values())
        size, device = sum(p.numel() for p in self._parameters), self._parameters[0].device
        self.flat = torch.zeros(size, device=device)
        """What parameters' gradients are views of: what `total` has become after noise."""
        self._wide = torch.from_numpy(np.zeros(size)).to(device)  # NumPy's zeros take no memory until written to
        self.total = self._wide
        """The sum, before noise: in float64, or `flat` itself while a step is summed in fp32."""
        self._examples = 0
        self._calls: list[_Call] = []
        self._listening = False
        self._kernels = _kernels(model, self._split(self.total))
        kept = sum(kernel.kept_per_example for kernel in self._kernels.values())
        self.micro_batch = max(8, KEPT_ELEMENTS // kept) if kept else LARGEST_MICRO_BATCH
        """Examples per `add` at most: what kernels keep then has a constant size."""
        self._hooks = [layer.register_forward_hook(self._hook(kernel)) for layer, kernel in self._kernels.items()]

    def gradients(self) -> dict[nn.Parameter, Tensor]:
        return self._split(self.flat)

    def named_sums(self) -> dict[str, Tensor]:
        sums = self._split(self.total)
        return {name: sums[p] for name, p in self._named.items()}

    def _split(self, flat: Tensor) -> dict[nn.Parameter, Tensor]:
        """Views of a flat vector in the shapes of the parameters."""
        parts = flat.split([p.numel() for p in self._parameters])
        return {p: part.view(p.shape) for p, part in zip(self._parameters, parts, strict=True)}

    def detach(self) -> None:
        """Take the hooks off the model."""
        for hook in self._hooks:
            hook.remove()

    def reset(self, examples: int | None = None, clip_norm: float = 1.0) -> None:
        """Begin a step: whatever an interrupted one left behind is gone.

        A step that tells how many examples it will add at most, and their clip norm, is summed in fp32 if it may be.
        """
        wanted = self.flat if examples is not None and self._may_use_fp32(examples, clip_norm) else self._wide
        if wanted is not self.total:
            self.total = wanted
            views = self._split(wanted)
            for layer, kernel in self._kernels.items():
                kernel.write_to({n: views[p] for n, p in layer.named_parameters(recurse=False) if p in views})
        self.total.zero_()
        self._examples = 0

    def _may_use_fp32(self, examples: int, clip_norm: float) -> bool:
        is_fp32 = all(p.dtype == torch.float32 for p in self._parameters)
        return is_fp32 and may_use_fp32(examples, clip_norm, self.flat.device)

    def add(self, losses_of: Callable[[], Tensor], clip_norm: float) -> Tensor:
        """Add the clipped gradients of one micro-batch; returns each example's norm before clipping.

        `losses_of` runs the model and gives one loss per example, the batch along the first axis.
        """
        with self._recording():
            losses = losses_of()
        calls, self._calls = self._calls, []
        if len(losses) == 0 or not calls:
            return losses.new_zeros(0)
        self._examples += len(losses)
        if self.total is self.flat and not self._may_use_fp32(self._examples, clip_norm):
            raise RuntimeError("more examples, or another clip norm, than the step was begun with: its sum is in fp32")
        received = torch.autograd.grad(losses.sum(), [call.edge for call in calls], allow_unused=True)
        with torch.no_grad():
            pairs = [(c, g) for c, g in zip(calls, received, strict=True) if g is not None]
            self._require_batch_first(pairs, len(losses))
            return self._add(pairs, losses, clip_norm)

    def _add(self, pairs: list[tuple[_Call, Tensor]], losses: Tensor, clip_norm: float) -> Tensor:
        layers: dict[Kernel, list[tuple[Tensor, Tensor]]] = {}
        for call, gradient in pairs:
            layers.setdefault(call.kernel, []).append((call.inputs, gradient))
        squares = torch.zeros(len(losses), dtype=torch.float64, device=losses.device)
        for kernel, uses in layers.items():
            squares += kernel.squared_norms(uses)
        norms = squares.sqrt()
        finite = norms.isfinite()
        factors = (clip_norm / (norms * (1 + NORM_MARGIN) + 1e-12)).clamp(max=1.0)
        # 0 · NaN is NaN: such an example must leave the product, not be weighted by zero.
        chosen = None if bool(finite.all()) else finite
        weights = factors if chosen is None else factors[chosen]
        if self.total is self.flat and bool((weights > SMALLEST_WEIGHT).all()):
            weights = weights.float()
        for kernel, uses in layers.items():
            kernel.add_weighted(uses, weights, chosen)
        return norms

    @contextmanager
    def _recording(self) -> Iterator[None]:
        self._calls, self._listening = [], True
        try:
            yield
        finally:
            self._listening = False

    def _hook(self, kernel: Kernel) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        def remember(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            if self._listening and torch.is_grad_enabled():
                if not (inputs and isinstance(inputs[0], Tensor) and isinstance(output, Tensor)):
                    raise UsageError(
                        f"layer '{kernel.name}' ({kernel.kind}) doesn't take one tensor (as its first, positional "
                        "argument) to one tensor, so its gradients can't be told apart by example: not possible with "
                        "privacy.unit = 'sample'"
                    )
                # The edge, not the tensor: an in-place activation would make the tensor stand for its own output.
                self._calls.append(_Call(kernel, inputs[0].detach(), get_gradient_edge(output)))

        return remember

    def _require_batch_first(self, pairs: list[tuple[_Call, Tensor]], size: int) -> None:
        for call, gradient in pairs:
            if len(call.inputs) != size or len(gradient) != size:
                raise UsageError(
                    f"layer '{call.kernel.name}' ({call.kernel.kind}) does not have the batch along "
                    "its first axis, so examples can't be told apart: not possible with privacy.unit = 'sample'"
                )


def _kernels(model: nn.Module, views: dict[nn.Parameter, Tensor]) -> dict[nn.Module, Kernel]:
    """A kernel for every module that holds trainable parameters of its own."""
    owners: dict[nn.Parameter, str] = {}
    kernels = {}
    for name, module in model.named_modules():
        own = {n: p for n, p in module.named_parameters(recurse=False) if p.requires_grad}
        for parameter_name, parameter in own.items():
            if parameter in owners:
                raise UsageError(
                    f"parameter '{name}.{parameter_name}' is shared with layer '{owners[parameter]}': tied parameters "
                    "can't be trained with privacy.unit = 'sample'"
                )
            owners[parameter] = name
        if own:
            kernels[module] = kernel_for(name or type(module).__name__, module, {n: views[p] for n, p in own.items()})
    return kernels
