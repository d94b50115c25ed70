"""Per-example gradient norms and weighted gradient sums, layer by layer.

A kernel knows one layer and the views where its gradients are summed. `uses` are the (input, output
gradient) pairs of the layer's applications in one forward pass, the batch along the first axis. Linear layers never
form a gradient per example. Small convolutions form them and keep them from the norm to the sum, which is cheaper
than going back twice; `kept_per_example` says how much that is, and the caller chooses its micro-batches by it, so
memory doesn't grow with the batch. Everything else goes through Opacus's per-layer samplers, or its functorch
fallback.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from client_app.weighted_sums import LARGEST_SQUARE, add_product, add_rows, chunks
from fedplat.errors import UsageError

Uses = list[tuple[Tensor, Tensor]]
LARGEST_KEPT = 1 << 18
"""Convolutions with more weights than this don't keep per-example gradients."""
RUN = 512
"""Squares summed in fp32 before float64 takes over."""
CANCELLATION = 2.0**-11
"""Where positions of an example cancel, its gradient is small beside the products P that are summed, and sums in fp32
err by about 2⁻²⁴‖P‖, which may exceed the clip norm. Norms count (2⁻¹¹‖P‖)² too: that error weighs about C/2¹³ then."""


class Kernel(Protocol):
    name: str
    kind: str
    kept_per_example: int

    def squared_norms(self, uses: Uses) -> Tensor:
        """‖gᵢ‖² of this layer's parameters for each example i."""
        ...

    def write_to(self, views: Mapping[str, Tensor]) -> None:
        """From now on sums are taken in these tensors, by parameter name, of fp32 or float64."""
        ...

    def add_weighted(self, uses: Uses, weights: Tensor, chosen: Tensor | None) -> None:
        """Add Σᵢ wᵢ·gᵢ over the chosen examples (a mask; None is all) into the layer's gradient views.

        Weights in fp32 allow products in fp32, where `client_app.weighted_sums` bounds their error.
        """
        ...


def kernel_for(name: str, layer: nn.Module, views: Mapping[str, Tensor]) -> Kernel:
    if type(layer) is nn.Linear:
        return LinearKernel(name, layer, views)
    if type(layer) is nn.Conv2d and _is_plain(layer):
        return ConvKernel(name, layer, views)
    return PerExampleKernel(name, layer, views)


def _is_plain(layer: nn.Conv2d) -> bool:
    return layer.groups == 1 and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)


def _square_sums(tensor: Tensor) -> Tensor:
    """‖rowᵢ‖² in float64: in fp32 a small norm would square to zero, and be clipped to nothing."""
    norms: Tensor = torch.linalg.vector_norm(tensor.flatten(1), dim=1, dtype=torch.float64)
    return norms.square_()


def _rows(tensor: Tensor, chosen: Tensor | None) -> Tensor:
    return tensor if chosen is None else tensor[chosen]


def _gradient_squares(gradients: Tensor) -> Tensor:
    """‖rowᵢ‖² of per-example gradients as they are: short runs in fp32 (wrong by < NORM_MARGIN), those in float64.

    What is too small to square in fp32 is far below any clip norm.
    """
    flat = gradients.flatten(1)
    whole = flat.shape[1] // RUN * RUN
    runs = torch.linalg.vector_norm(flat[:, :whole].reshape(len(flat), -1, RUN), dim=2)
    return _square_sums(runs) + _square_sums(flat[:, whole:])


class LinearKernel:
    """y = xWᵀ + b. With one vector per example, ‖∇W‖ = ‖x‖·‖dy‖; with several, the cheaper of Gram matrices and ∇W."""

    kept_per_example = 0

    def __init__(self, name: str, layer: nn.Linear, views: Mapping[str, Tensor]) -> None:
        self.name, self.kind = name, type(layer).__name__
        self._is_bounded = False
        self.write_to(views)

    def write_to(self, views: Mapping[str, Tensor]) -> None:
        self._weight, self._bias = views.get("weight"), views.get("bias")

    def squared_norms(self, uses: Uses) -> Tensor:
        inputs, gradients = _joined(uses)
        self._is_bounded = False
        if inputs.shape[1] == 1:
            of_inputs, of_gradients = _square_sums(inputs), _square_sums(gradients)
            self._is_bounded = bool(torch.maximum(of_inputs, of_gradients).max() < LARGEST_SQUARE)  # no NaN is below
            factors = of_inputs + 1 if self._bias is not None else of_inputs
            return of_gradients * (factors if self._weight is not None else 1.0)
        total = gradients.new_zeros(len(gradients), dtype=torch.float64)
        if self._bias is not None:
            total += _square_sums(gradients.sum(1))
            total += CANCELLATION**2 * gradients.shape[1] * _square_sums(gradients)
        if self._weight is not None:
            total += _product_norms(gradients.transpose(1, 2), inputs)
        return total

    def add_weighted(self, uses: Uses, weights: Tensor, chosen: Tensor | None) -> None:
        """In fp32 only outer products of one input and one output gradient, neither of them extreme."""
        dtype = weights.dtype if self._is_bounded else torch.float64
        for inputs, gradients in uses:
            column = weights.to(dtype).reshape(-1, *[1] * (gradients.dim() - 1))
            scaled = _rows(gradients, chosen).to(dtype) * column
            flat = scaled.reshape(-1, scaled.shape[-1])
            if self._weight is not None:
                add_product(self._weight, flat, _rows(inputs, chosen).reshape(-1, inputs.shape[-1]))
            if self._bias is not None:
                self._bias.add_(flat.sum(0))


def _joined(uses: Uses) -> tuple[Tensor, Tensor]:
    """All applications of a layer as one sequence per example: [batch, positions, features]."""
    inputs = [i.reshape(len(i), -1, i.shape[-1]) for i, _ in uses]
    gradients = [g.reshape(len(g), -1, g.shape[-1]) for _, g in uses]
    if len(uses) == 1:
        return inputs[0], gradients[0]
    return torch.cat(inputs, 1), torch.cat(gradients, 1)


def _product_norms(left: Tensor, right: Tensor) -> Tensor:
    """‖leftᵢ @ rightᵢ‖² for each i, and what cancellation may hide; left is [batch, rows, inner], right [batch, inner,
    columns]."""
    _, rows, inner = left.shape
    columns = right.shape[2]
    by_gram = inner * (rows + columns) < rows * columns
    norms = []
    for part in chunks(len(left), inner * inner * 2 if by_gram else rows * columns):
        a, b = left[part], right[part]
        if by_gram:  # ‖AB‖² = ⟨AᵀA, BBᵀ⟩; in double precision, because its terms may cancel
            a, b = a.double(), b.double()
            gram = torch.bmm(a.transpose(1, 2), a).mul_(torch.bmm(b, b.transpose(1, 2)))
            norms.append(gram.sum((1, 2)).clamp_(min=0.0))
        else:
            norms.append(_square_sums(torch.bmm(a, b)))
    return torch.cat(norms) + CANCELLATION**2 * _square_sums(left) * _square_sums(right)


class ConvKernel:
    """A 2-D convolution: per-example gradients as products of output gradients and unfolded patches.

    Small ones are kept for the weighted sum; a large layer goes through the convolution's own backward instead.
    """

    def __init__(self, name: str, layer: nn.Conv2d, views: Mapping[str, Tensor]) -> None:
        self.name, self.kind, self.layer = name, type(layer).__name__, layer
        self.write_to(views)
        is_small = self._weight is not None and self._weight.numel() <= LARGEST_KEPT
        self.kept_per_example = layer.weight.numel() if is_small else 0
        self._kept = torch.empty(0)
        self._patches = torch.empty(0)

    def write_to(self, views: Mapping[str, Tensor]) -> None:
        self._weight, self._bias = views.get("weight"), views.get("bias")

    def squared_norms(self, uses: Uses) -> Tensor:
        total = uses[0][1].new_zeros(len(uses[0][1]), dtype=torch.float64)
        if self._bias is not None:
            total += _square_sums(self._bias_sums(uses))
        if self._weight is not None:
            total += self._kept_norms(uses) if self.kept_per_example else self._weight_norms(uses)
        return total

    @staticmethod
    def _bias_sums(uses: Uses) -> Tensor:
        return torch.stack([gradients.sum((2, 3)) for _, gradients in uses]).sum(0)

    def _kept_norms(self, uses: Uses) -> Tensor:
        """Norms of the per-example gradients, which stay in a buffer that is allocated once."""
        size, weight = len(uses[0][0]), self.layer.weight
        if len(self._kept) < size:
            self._kept = weight.new_empty(size, weight.shape[0], weight[0].numel())
        for use, (inputs, gradients) in enumerate(uses):
            for part in chunks(size, gradients[0, 0].numel() * weight[0].numel()):
                patches, wanted = self._unfolded(inputs[part]), self._kept[part]
                wanted.baddbmm_(gradients[part].flatten(2), patches.transpose(1, 2), beta=0 if use == 0 else 1)
        return _gradient_squares(self._kept[:size])

    def _weight_norms(self, uses: Uses) -> Tensor:
        """Norms of a large layer, a few examples at a time."""
        positions = sum(gradients[0, 0].numel() for _, gradients in uses)
        norms = []
        for part in chunks(len(uses[0][0]), self.layer.weight[0].numel() * positions):
            patches = torch.cat([self._unfolded(inputs[part]).clone() for inputs, _ in uses], 2)
            gradients = torch.cat([g[part].flatten(2) for _, g in uses], 2)
            norms.append(_product_norms(gradients, patches.transpose(1, 2)))
        return torch.cat(norms)

    def _unfolded(self, inputs: Tensor) -> Tensor:
        """Patches as [batch, weights of one output channel, positions], in a buffer that is used again."""
        layer = self.layer
        assert not isinstance(layer.padding, str)
        (above, beside), (down, across) = layer.padding, layer.stride
        padded = pad(inputs, (beside, beside, above, above)) if above or beside else inputs
        height, width = [d * (k - 1) + 1 for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
        windows = padded.unfold(2, height, down).unfold(3, width, across)
        windows = windows[..., :: layer.dilation[0], :: layer.dilation[1]].permute(0, 1, 4, 5, 2, 3)
        if self._patches.numel() < windows.numel():
            self._patches = inputs.new_empty(windows.numel())
        buffer = self._patches[: windows.numel()].view(windows.shape)
        return buffer.copy_(windows).view(len(inputs), layer.weight[0].numel(), -1)

    def add_weighted(self, uses: Uses, weights: Tensor, chosen: Tensor | None) -> None:
        if self.kept_per_example and self._weight is not None:
            add_rows(self._weight, _rows(self._kept[: len(uses[0][0])], chosen), weights)
        elif self._weight is not None:
            column = weights.double().reshape(-1, 1, 1, 1)
            for inputs, gradients in uses:
                scaled = _rows(gradients, chosen).double() * column
                self._weight.add_(self._backward(_rows(inputs, chosen).double(), scaled))
        if self._bias is not None:  # the very sums whose norms were taken
            add_rows(self._bias, _rows(self._bias_sums(uses), chosen), weights)

    def _backward(self, inputs: Tensor, gradients: Tensor) -> Tensor:
        layer = self.layer
        _, weight, _ = torch.ops.aten.convolution_backward(
            gradients, inputs, layer.weight.double(), None, layer.stride, layer.padding, layer.dilation,
            False, [0, 0], 1, [False, True, False],
        )  # fmt: skip
        return weight  # type: ignore[no-any-return]


class PerExampleKernel:
    """Any other layer: per-example gradients by Opacus, a chunk of examples at a time, kept if the layer is small."""

    def __init__(self, name: str, layer: nn.Module, views: Mapping[str, Tensor]) -> None:
        self.name, self.kind, self.layer = name, type(layer).__name__, layer
        self.write_to(views)
        self._sampler = _opacus_sampler(name, layer)
        size = sum(view.numel() for view in views.values())
        self.kept_per_example = size if size <= LARGEST_KEPT else 0
        self._kept: list[dict[nn.Parameter, Tensor]] = []

    def write_to(self, views: Mapping[str, Tensor]) -> None:
        self._views = {getattr(self.layer, n): view for n, view in views.items()}

    def squared_norms(self, uses: Uses) -> Tensor:
        squares = []
        self._kept = []
        for part in self._parts(uses):
            samples = self._samples(uses, part)
            squares.append(torch.stack([_gradient_squares(g) for g in samples.values()]).sum(0))
            if self.kept_per_example:
                self._kept.append(samples)
        return torch.cat(squares)

    def add_weighted(self, uses: Uses, weights: Tensor, chosen: Tensor | None) -> None:
        full = weights if chosen is None else weights.new_zeros(len(chosen)).masked_scatter(chosen, weights)
        kept, self._kept = self._kept, []
        for number, part in enumerate(self._parts(uses)):
            samples = kept[number] if kept else self._samples(uses, part)
            of_part = None if chosen is None else chosen[part]
            for parameter, gradients in samples.items():
                add_rows(self._views[parameter], _rows(gradients, of_part), _rows(full[part], of_part))

    def _parts(self, uses: Uses) -> Iterator[slice]:
        inputs, gradients = uses[0]
        largest = max(sum(p.numel() for p in self._views), inputs[:1].numel(), gradients[:1].numel())
        return chunks(len(inputs), largest)

    def _samples(self, uses: Uses, part: slice) -> dict[nn.Parameter, Tensor]:
        totals: dict[nn.Parameter, Tensor] = {}
        for inputs, gradients in uses:
            for parameter, found in self._sampler(self.layer, [inputs[part]], gradients[part]).items():
                if parameter in self._views:
                    totals[parameter] = totals[parameter] + found if parameter in totals else found
        return totals


def _opacus_sampler(name: str, layer: nn.Module) -> Callable[[nn.Module, list[Tensor], Tensor], Any]:
    from opacus.grad_sample import GradSampleModule
    from opacus.grad_sample.functorch import ft_compute_per_sample_gradient, prepare_layer

    found = GradSampleModule.GRAD_SAMPLERS.get(type(layer))
    pads_zeros = getattr(layer, "padding_mode", "zeros") == "zeros"  # Opacus's samplers know no other padding
    if found is not None and pads_zeros:
        return found  # type: ignore[no-any-return]
    try:
        prepare_layer(layer)
    except NotImplementedError as error:
        kind = type(layer).__name__
        raise UsageError(f"layer '{name}' ({kind}) can't be trained with privacy.unit = 'sample': {error}") from None
    return ft_compute_per_sample_gradient  # type: ignore[no-any-return]
