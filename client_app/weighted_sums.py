"""Sums of clipped gradients: in fp32 where the error of that is provably small, in float64 everywhere else.

In fp32 the rounding of a sum depends on every example in it, so one example more may move the sum by more than C
(Casacuberta et al. 2022, "Widespread underestimation of sensitivity"). How much more is bounded here for *any* data.

Claim. Let v₁ … vₙ, n ≤ MOST_IN_FP32, be what the examples of a step contribute: ‖vᵢ‖ ≤ C, and vᵢ depends on example i
only. If every coordinate of Σvᵢ is summed in fp32, in any order (each coordinate may have its own, fused products or
not, micro-batch after micro-batch), then the sums of two batches that differ in one example are at most C·(1 +
SUM_MARGIN) apart.

Proof. A summation is a binary tree with the vᵢ(j) and a zero as its leaves; vᵢ(j) is rounded once as a product and
once at each of the dᵢ(j) nodes above it, each time by a factor within 1 ± u, u = 2⁻²⁴. So coordinate j errs by at
most u′·Σᵢ (dᵢ(j) + 1)·|vᵢ(j)|, u′ = u·(1 + 2⁻¹⁴), which by Cauchy and Schwarz is at most u′·√Σᵢ(dᵢ(j) +
1)²·√Σᵢvᵢ(j)². Of all trees with n + 1 leaves the caterpillar has the largest Σ(d + 1)²: 2² + … + (n + 1)² + (n + 1)²
< (n + 3)³/3. Over all coordinates, ‖error‖ ≤ u′·√((n + 3)³/3)·√(n·C²) < u′·(n + 3)²·C/√3. The sums of both batches
err: twice that is below 0.00633·C for n = 300.

What fp32 can't hold. With C in CLIP_RANGE no sum overflows. Numbers below 2⁻¹²⁶ may be rounded by up to 2⁻¹²⁶ or
flushed to zero. The factors of an outer product have norms of at most 2⁴² (LARGEST_SQUARE) and no more than 2⁴⁰
entries over all layers, so n examples lose at most 2·n·2⁻¹²⁶·2⁴²·2²⁰ < 2⁻¹⁴·C; partial sums lose less. For both
batches: below 0.00013·C.

Who falls back to float64. An example with larger factors takes its micro-batch with it, the 301st the whole step.
Then the others' vᵢ = wᵢ·gᵢ are no longer rounded to fp32 (twice: the weight, and the product), and move by at most
2u′·C each: below 0.00004·C. All three together are below SUM_MARGIN. That ‖vᵢ‖ ≤ C in spite of these two roundings is
`NORM_MARGIN`'s.

A vᵢ that is itself a sum, over positions of a sequence or an image, has no such bound: its terms may be huge and
cancel. Such sums are formed in float64, or formed before their norm is taken.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

CHUNK_ELEMENTS = 1 << 18
"""Numbers in one temporary of a kernel (1 MB): they stay in a core's cache."""
MOST_IN_FP32 = 300
"""Examples of one step whose sum may be taken in fp32."""
SUM_MARGIN = 7 * 2.0**-10
"""By how much, relative to C, sums in fp32 let one example move them further."""
CLIP_RANGE = (2.0**-40, 2.0**40)
LARGEST_SQUARE = 2.0**84
"""Squared norm of an example's input or output gradient up to which products are taken in fp32."""
SMALLEST_WEIGHT = 2.0**-120
"""fp32 has fewer digits for smaller ones: then all examples of the micro-batch are weighted in float64."""

WORTH_ONEDNN = 1 << 16
"""Elements of a product from which oneDNN, which uses all of an AMD core, beats MKL, which uses half of it."""
_HAS_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def may_use_fp32(examples: int, clip_norm: float, device: torch.device) -> bool:
    """Whether the claim above covers a step of that many examples on this device, as torch is set up now."""
    fits = examples <= MOST_IN_FP32 and CLIP_RANGE[0] <= clip_norm <= CLIP_RANGE[1]
    return fits and device.type == "cpu" and _products_are_fp32()


def _products_are_fp32() -> bool:
    """Users may allow torch to take products of fp32 matrices in bf16 or TF32."""
    matmul = getattr(torch.backends.mkldnn, "matmul", None)
    if matmul is None:  # before torch 2.9
        return torch.get_float32_matmul_precision() == "highest"
    found = {torch.backends.fp32_precision, torch.backends.mkldnn.fp32_precision, matmul.fp32_precision}  # type: ignore[attr-defined]
    return found <= {"none", "ieee"}


def chunks(size: int, elements: int) -> Iterator[slice]:
    """Slices of the batch whose temporaries have about CHUNK_ELEMENTS numbers; `elements` is one example's."""
    step = max(1, CHUNK_ELEMENTS // max(1, elements))
    return (slice(start, min(size, start + step)) for start in range(0, size, step))


def add_rows(total: Tensor, gradients: Tensor, weights: Tensor) -> None:
    """total += Σᵢ wᵢ·gradientsᵢ in the precision of the weights; in float64 a few columns at a time."""
    flat, rows = total.view(-1), gradients.flatten(1)
    if weights.dtype == flat.dtype == rows.dtype:
        flat.addmv_(rows.t(), weights)
        return
    width = max(1, CHUNK_ELEMENTS // (2 * max(1, len(rows))))
    for start in range(0, flat.numel(), width):
        part = slice(start, start + width)
        flat[part].add_(torch.mv(rows[:, part].t().double(), weights.double()))


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += leftᵀ·right in the precision of `left`."""
    right = right.to(left.dtype)
    if left.dtype == torch.float32 and total.numel() >= WORTH_ONEDNN and _HAS_ONEDNN and torch.backends.mkldnn.enabled:
        total.add_(torch.ops.mkldnn._linear_pointwise(left.t(), right.t(), None, "none", [], ""))
    elif left.dtype == total.dtype:
        total.addmm_(left.t(), right)
    else:
        total.add_(torch.mm(left.t(), right))
