"""Stacked MLPs by hand: forward, backward and update as one batched matrix product each.

For chains of Linear, Flatten and simple activations, the backward pass is three lines per layer. Writing them out saves
autograd's bookkeeping and, with plain SGD, the gradient itself: `W += -lr · dᵀx` is one matrix product that
accumulates into the weights. The loss stays the task's own: autograd differentiates it with respect to the outputs.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

Stack = dict[str, Tensor]
Layers = list[tuple[str, nn.Module]]
Apply = Callable[[str, Tensor, Tensor], None]
"""Called with a parameter's name, and the two factors of its gradient: gradient = bmm(left, right)."""

_aten = torch.ops.aten
_BACKWARD: dict[type[nn.Module], Callable[[Tensor, Tensor], Tensor]] = {
    nn.ReLU: lambda gradient, output: _aten.threshold_backward(gradient, output, 0),
    nn.Tanh: _aten.tanh_backward,
    nn.Sigmoid: _aten.sigmoid_backward,
}


def layers_of(module: nn.Module, prefix: str = "") -> Layers:
    """The layers of nested Sequentials in order, with the prefix of their parameters' names."""
    if not isinstance(module, nn.Sequential):
        return [(prefix, module)]
    return [pair for name, child in module.named_children() for pair in layers_of(child, f"{prefix}{name}.")]


def is_plain_mlp(layers: Layers) -> bool:
    """Exact types only: a subclass may do more than its parent. Flatten may only come first."""
    kinds = [type(layer) for _, layer in layers]
    known = all(kind in (nn.Linear, nn.Flatten, *_BACKWARD) for kind in kinds)
    return known and nn.Linear in kinds and nn.Flatten not in kinds[1:]


def forward(layers: Layers, stack: Stack, inputs: Tensor) -> list[Tensor]:
    """The input of every layer, and the output of the last: activations[i] goes into layer i."""
    activations = [inputs]
    for prefix, layer in layers:
        value = activations[-1]
        if isinstance(layer, nn.Linear):
            value = _linear(layer, prefix, stack, value)
        elif isinstance(layer, nn.Flatten):
            value = value.flatten(2)
        else:
            value = layer(value)
        activations.append(value)
    return activations


def _linear(layer: nn.Linear, prefix: str, stack: Stack, inputs: Tensor) -> Tensor:
    weight = stack.get(f"{prefix}weight")
    if weight is None:  # frozen: one weight for all clients
        return nn.functional.linear(inputs, layer.weight, layer.bias)
    product_weight = weight.transpose(1, 2)
    bias = stack.get(f"{prefix}bias", layer.bias)
    if bias is None:
        return torch.bmm(inputs, product_weight)
    return torch.baddbmm(bias.unsqueeze(-2), inputs, product_weight)


def backward(layers: Layers, stack: Stack, activations: list[Tensor], gradient: Tensor, apply: Apply) -> None:
    """Walk back from the gradient of the outputs; `apply` gets each parameter's gradient as two factors.

    A layer's parameters are applied only after the gradient has passed through it, so `apply` may change them.
    """
    lowest = min(i for i, (prefix, _) in enumerate(layers) if f"{prefix}weight" in stack or f"{prefix}bias" in stack)
    for i in range(len(layers) - 1, lowest - 1, -1):
        prefix, layer = layers[i]
        if not isinstance(layer, nn.Linear):
            gradient = _BACKWARD[type(layer)](gradient, activations[i + 1])
            continue
        weight = stack.get(f"{prefix}weight")
        below = None
        if i > lowest:
            below = torch.bmm(gradient, weight) if weight is not None else gradient @ layer.weight
        if weight is not None:
            apply(f"{prefix}weight", gradient.transpose(1, 2), activations[i])
        if f"{prefix}bias" in stack:
            apply(f"{prefix}bias", gradient.transpose(1, 2), gradient.new_ones(len(gradient), gradient.shape[1], 1))
        if below is not None:
            gradient = below
