"""Per-example clipping with one backward pass: Σᵢ min(1, C/‖gᵢ‖)·gᵢ without ever forming all the gᵢ.

Book-keeping (Bu et al. 2023, "Differentially private optimization on large model at small cost"): differentiate only
with respect to the *outputs* of layers, get each example's gradient norm from a layer's input and output gradient
(`client_app.layer_gradients`), then form the clipped sum once, as one matrix product per layer.

Invariants: an example whose gradient has a NaN or an infinity contributes exactly nothing; every other example
contributes a vector of norm ≤ C; all trainable parameters count in the norm, whatever layer they are in. Norms and sums
are taken in float64: in fp32 the rounding of a large sum depends on every example in it, and moves by more than C when
one is added (Casacuberta et al. 2022, "Widespread underestimation of sensitivity").
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from client_app.layer_gradients import Kernel, kernel_for
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
        parameters = list(self._named.values())
        size, device = sum(p.numel() for p in parameters), parameters[0].device
        self.total = torch.zeros(size, dtype=torch.float64, device=device)
        """The sum, before noise."""
        self.flat = torch.zeros(size, device=device)
        """What parameters' gradients are views of: what `total` has become after noise."""
        self._views = dict(zip(parameters, _split(self.flat, parameters), strict=True))
        self._sums = dict(zip(parameters, _split(self.total, parameters), strict=True))
        self._calls: list[_Call] = []
        self._listening = False
        self._kernels = _kernels(model, self._sums)
        kept = sum(kernel.kept_per_example for kernel in self._kernels.values())
        self.micro_batch = max(8, KEPT_ELEMENTS // kept) if kept else LARGEST_MICRO_BATCH
        """Examples per `add` at most: what kernels keep then has a constant size."""
        self._hooks = [layer.register_forward_hook(self._hook(kernel)) for layer, kernel in self._kernels.items()]

    def gradients(self) -> dict[nn.Parameter, Tensor]:
        return self._views

    def named_sums(self) -> dict[str, Tensor]:
        return {name: self._sums[p] for name, p in self._named.items()}

    def detach(self) -> None:
        """Take the hooks off the model."""
        for hook in self._hooks:
            hook.remove()

    def reset(self) -> None:
        """Begin a step: whatever an interrupted one left behind is gone."""
        self.total.zero_()

    def add(self, losses_of: Callable[[], Tensor], clip_norm: float) -> Tensor:
        """Add the clipped gradients of one micro-batch; returns each example's norm before clipping.

        `losses_of` runs the model and gives one loss per example, the batch along the first axis.
        """
        with self._recording():
            losses = losses_of()
        calls, self._calls = self._calls, []
        if len(losses) == 0 or not calls:
            return losses.new_zeros(0)
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
        for kernel, uses in layers.items():
            kernel.add_weighted(uses, factors if chosen is None else factors[chosen], chosen)
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


def _split(flat: Tensor, parameters: list[nn.Parameter]) -> Iterator[Tensor]:
    """Views of a flat vector in the shapes of the parameters."""
    start = 0
    for parameter in parameters:
        yield flat[start : start + parameter.numel()].view(parameter.shape)
        start += parameter.numel()


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
