"""Sums in fp32: for any data, what one example more can do is within the margin that the noise has for it."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_clipping import MODELS, built, losses
from torch import Tensor, nn

from client_app.clipping import ClippedSum
from client_app.dp_sgd import EXAMPLE_MARGIN, ROUNDING_MARGIN
from client_app.weighted_sums import CLIP_RANGE, MOST_IN_FP32, SUM_MARGIN, WORTH_ONEDNN, add_product, may_use_fp32

CPU = torch.device("cpu")


def summed(inputs: Tensor, slopes: Tensor, clip_norm: float, micro: int, narrow: bool, bias: bool = True) -> Tensor:
    """The clipped sum of a linear layer whose example i has the input xᵢ and the output gradient gᵢ."""
    torch.manual_seed(0)
    model = nn.Linear(inputs.shape[1], slopes.shape[1], bias=bias)
    total = ClippedSum(model)
    total.reset(len(inputs) if narrow else None, clip_norm)
    for rows in torch.arange(len(inputs)).split(micro):
        total.add(lambda rows=rows: (model(inputs[rows]) * slopes[rows]).sum(1), clip_norm)
    assert total.total.dtype == (torch.float32 if narrow else torch.float64)
    return total.total.double()


def adversary(kind: str, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    inputs, slopes = normal(size, 20), normal(size, 12)
    match kind:
        case "all alike":
            inputs[:], slopes[:] = inputs[:1], slopes[:1]
        case "pairs that cancel":
            inputs[:], slopes[:] = inputs[:1], slopes[:1]
            slopes[::2] *= -1
        case "growing":
            inputs[:], slopes[:] = inputs[:1], slopes[:1] * torch.logspace(-8, 0, size)[:, None]
        case "one direction each":
            inputs, slopes = inputs * 0, slopes * 0
            inputs[torch.arange(size), torch.arange(size) % 20] = 1.0
            slopes[torch.arange(size), torch.arange(size) % 12] = 1.0
        case "all magnitudes":
            inputs *= 10 ** (normal(size, 20) * 8).clamp(-37, 30)
            slopes *= 10 ** (normal(size, 12) * 8).clamp(-37, 30)
        case "tiny beside huge":
            inputs, slopes = inputs * 1e30, slopes * 1e-42
        case "denormal":
            inputs, slopes = inputs * 1e-41, slopes * 1e11
    return inputs, slopes


KINDS = ["random", "all alike", "pairs that cancel", "growing", "one direction each", "all magnitudes",
         "tiny beside huge", "denormal"]  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(KINDS), size=st.sampled_from([2, 64, 257, MOST_IN_FP32]), micro=st.sampled_from([1, 50, 999]),
    clip_norm=st.sampled_from([CLIP_RANGE[0], 1e-3, 1.0, 37.0, CLIP_RANGE[1]]), seed=st.integers(0, 10**6),
)  # fmt: skip
def test_one_example_moves_a_sum_in_fp32_by_no_more_than_its_margin(kind, size, micro, clip_norm, seed):
    inputs, slopes = adversary(kind, size, torch.Generator().manual_seed(seed))
    found = summed(inputs, slopes, clip_norm, micro, narrow=True)
    fewer = summed(inputs[1:], slopes[1:], clip_norm, micro, narrow=True)
    exact = summed(inputs, slopes, clip_norm, micro, narrow=False)
    assert bool(found.isfinite().all())
    assert float((found - fewer).norm()) <= clip_norm * (1 + SUM_MARGIN)
    weight_rounding = 2e-7 * size  # an example's own fp32 weight: within its norm's margin, but it adds up
    assert float((found - exact).norm()) <= clip_norm * (SUM_MARGIN / 2 + weight_rounding)


def test_a_sum_that_always_rounds_the_same_way_is_within_the_margin():
    """One coordinate, one example after another, each the largest below C whose addition rounds up by half a unit."""
    total, exact = np.float32(0.0), Fraction(0)
    for _ in range(MOST_IN_FP32):
        unit = float(np.spacing(np.float32(total + np.float32(1.0))))
        part = np.float32(1.0 - unit * 0.49)
        exact += Fraction(float(part))
        total = np.float32(total + part)
    error = abs(float(Fraction(float(total)) - exact))
    assert SUM_MARGIN / 5 < error <= SUM_MARGIN / 2


def test_the_arithmetic_of_the_proof():
    n, unit = MOST_IN_FP32, 2.0**-24 * (1 + 2.0**-14)
    assert (1 + 2.0**-24) ** (n + 2) - 1 <= (n + 2) * unit
    assert sum((depth + 1) ** 2 for depth in [*range(1, n + 1), n]) < (n + 3) ** 3 / 3
    assert 2 * unit * (n + 3) ** 2 / math.sqrt(3) < 0.00633
    assert 2 * n * 2.0 ** (-126 + 42 + 20) / CLIP_RANGE[0] < 2.0**-14
    assert 2 * 2.0**-14 < 0.00013 and n * 2 * unit < 0.00004
    assert SUM_MARGIN > 0.00633 + 0.00013 + 0.00004
    assert ROUNDING_MARGIN == EXAMPLE_MARGIN + SUM_MARGIN == 2.0**-7


@pytest.mark.parametrize("name", MODELS)
def test_fp32_gives_the_sum_of_float64(name):
    model, inputs, targets = built(name)
    total = ClippedSum(model)
    sums = []
    for examples in (None, len(inputs)):
        total.reset(examples, 0.5)
        for rows in torch.arange(len(inputs)).split(4):
            total.add(lambda rows=rows: losses(model, inputs[rows], targets[rows]), 0.5)
        sums.append(total.total.double())
    assert total.total is total.flat
    torch.testing.assert_close(sums[1], sums[0], rtol=1e-5, atol=1e-6)


def test_what_the_claim_does_not_cover_is_summed_in_float64():
    assert may_use_fp32(MOST_IN_FP32, 1.0, CPU)
    assert not may_use_fp32(MOST_IN_FP32 + 1, 1.0, CPU)
    for clip_norm in (1e-25, 1e25, math.inf, math.nan):
        assert not may_use_fp32(1, clip_norm, CPU)
    assert not may_use_fp32(1, 1.0, torch.device("meta"))
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    try:
        assert not may_use_fp32(1, 1.0, CPU)
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = "none"
    assert may_use_fp32(1, 1.0, CPU)


def test_a_step_in_fp32_adds_no_more_examples_than_the_claim_covers():
    model = nn.Linear(3, 2)
    total = ClippedSum(model)
    total.reset(MOST_IN_FP32, 1.0)
    total.add(lambda: model(torch.ones(MOST_IN_FP32, 3)).sum(1), 1.0)
    before = total.total.clone()
    with pytest.raises(RuntimeError, match="more examples"):
        total.add(lambda: model(torch.ones(1, 3)).sum(1), 1.0)
    assert torch.equal(total.total, before)
    total.reset()
    assert total.total.dtype == torch.float64 and not bool(total.total.any())


@pytest.mark.parametrize("shape", [(3, 4), (256, WORTH_ONEDNN // 256), (1024, 100)])
@pytest.mark.parametrize("examples", [1, 17, 300])
def test_a_product_errs_no_more_than_any_sum_of_its_terms(shape, examples):
    left, right = torch.randn(examples, shape[0]), torch.randn(examples, shape[1])
    total = torch.ones(shape)
    add_product(total, left, right)
    exact = left.double().t() @ right.double() + 1
    limit = (examples + 2) * 2.0**-24 * (left.double().abs().t() @ right.double().abs() + 1)
    assert bool(((total.double() - exact).abs() <= limit).all())
