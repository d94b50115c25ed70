"""Per-example clipping: the clipped sum is that of a loop over single examples, and nobody's share exceeds C."""

import math
import warnings
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from client_app.clipping import NORM_MARGIN, ClippedSum
from client_app.dp_sgd import EXAMPLE_MARGIN
from client_app.layer_gradients import LARGEST_KEPT, ConvKernel, LinearKernel, PerExampleKernel

SIZE = 6


class Sequence(nn.Module):
    """A linear layer over positions. Few and wide positions take the Gram matrices, many and narrow ones don't."""

    def __init__(self, features: int, outputs: int, bias: bool = True) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(features, outputs, bias=bias), nn.Linear(outputs, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).tanh().mean(1))


class Twice(nn.Module):
    """One layer of each kind, applied twice."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.line = nn.Conv2d(2, 2, 3, padding=1), nn.GroupNorm(1, 2), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.conv(self.norm(self.conv(x)).relu()).relu()).flatten(1)
        return self.line(self.line(h).tanh())


class Scale(nn.Module):
    """A layer of its own that Opacus knows nothing of."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.factor, self.shift = nn.Parameter(torch.rand(size)), nn.Parameter(torch.rand(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor.sin() + self.shift**2


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm, self.line = nn.Embedding(11, 5), nn.LayerNorm(5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.line(self.norm(self.words(x)).sum(1))


def images(*layers: nn.Module) -> tuple[nn.Module, Tensor]:
    return nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(3)), torch.randn(SIZE, 2, 8, 8)


def frozen_middle() -> nn.Module:
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3))
    model[2].requires_grad_(False)
    return model


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "mlp": lambda: (nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3)), torch.randn(SIZE, 5)),
    "no bias": lambda: (nn.Sequential(nn.Linear(5, 7, bias=False), nn.Tanh(), nn.Linear(7, 3, bias=False)),
                        torch.randn(SIZE, 5)),
    "only a bias trains": lambda: (_frozen(nn.Sequential(nn.Linear(5, 3)), "weight"), torch.randn(SIZE, 5)),
    "sequence by Gram": lambda: (Sequence(40, 50), torch.randn(SIZE, 3, 40)),
    "sequence by products": lambda: (Sequence(4, 3), torch.randn(SIZE, 20, 4)),
    "sequence without bias": lambda: (Sequence(40, 50, bias=False), torch.randn(SIZE, 3, 40)),
    "convolutions": lambda: images(nn.Conv2d(2, 4, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 2, bias=False)),
    "odd strides, padding and dilation": lambda: images(
        nn.Conv2d(2, 4, (3, 2), stride=(2, 1), padding=(2, 1), dilation=(1, 2)), nn.Tanh()),
    "a convolution too large to keep": lambda: images(nn.Conv2d(2, 64, 3), nn.ReLU(), nn.Conv2d(64, 460, 3)),
    "grouped": lambda: images(nn.Conv2d(2, 4, 3, groups=2)),
    "circular padding": lambda: images(nn.Conv2d(2, 4, 3, padding=1, padding_mode="circular")),
    "same padding": lambda: images(nn.Conv2d(2, 4, 3, padding="same")),
    "group norm": lambda: images(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU()),
    "layer norm": lambda: (nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6), nn.Linear(6, 3)), torch.randn(SIZE, 5)),
    "embedding": lambda: (Words(), torch.randint(0, 11, (SIZE, 4))),
    "layers applied twice": lambda: (Twice(), torch.randn(SIZE, 2, 4, 4)),
    "activation in place": lambda: (nn.Sequential(nn.Linear(5, 7), nn.ReLU(inplace=True), nn.Linear(7, 3)),
                                    torch.randn(SIZE, 5)),
    "frozen in the middle": lambda: (frozen_middle(), torch.randn(SIZE, 5)),
    "a layer of one's own": lambda: (nn.Sequential(nn.Linear(5, 7), Scale(7), nn.Linear(7, 3)), torch.randn(SIZE, 5)),
    "a 1-D convolution": lambda: (nn.Sequential(nn.Conv1d(2, 3, 3), nn.Flatten(), nn.LazyLinear(3)),
                                  torch.randn(SIZE, 2, 9)),
}  # fmt: skip


def _frozen(model: nn.Module, ending: str) -> nn.Module:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.endswith(ending))
    return model


def built(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(3)
    model, inputs = MODELS[name]()
    with torch.no_grad():
        model(inputs)  # lazy layers
    return model, inputs, torch.arange(len(inputs)) % 3


def losses(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(model(inputs), targets, reduction="none")


def clipped(model: nn.Module, inputs: Tensor, targets: Tensor, clip_norm: float, split: int = 99) -> Tensor:
    total = ClippedSum(model)
    for part in torch.arange(len(inputs)).split(split):
        total.add(lambda part=part: losses(model, inputs[part], targets[part]), clip_norm)
    total.detach()
    return total.total


def norms_and_sum(model: nn.Module, inputs: Tensor, targets: Tensor, clip_norm: float) -> tuple[list[float], Tensor]:
    """The reference: one example at a time, clipped and summed in double precision."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    norms, total = [], torch.zeros(sum(p.numel() for p in parameters), dtype=torch.float64)
    for row in range(len(inputs)):
        gradients = torch.autograd.grad(losses(model, inputs[row : row + 1], targets[row : row + 1]).sum(), parameters)
        flat = torch.cat([g.flatten() for g in gradients]).double()
        norms.append(float(flat.norm()))
        total += flat * min(1.0, clip_norm / norms[-1])
    return norms, total


@pytest.mark.parametrize("name", MODELS)
def test_clipped_sum_is_that_of_a_loop_over_examples(name):
    model, inputs, targets = built(name)
    norms, _ = norms_and_sum(model, inputs, targets, 1.0)
    for clip_norm in (sorted(norms)[SIZE // 2], 1e-3, 1e3):  # some are clipped, all, none
        _, expected = norms_and_sum(model, inputs, targets, clip_norm)
        found = clipped(model, inputs, targets, clip_norm).double()
        assert float((found - expected).norm()) <= 3e-5 * float(expected.norm()) + 1e-9


def test_the_cases_reach_every_kernel():
    def kinds(name: str) -> set[tuple[type, bool]]:
        total = ClippedSum(built(name)[0])
        return {(type(kernel), kernel.kept_per_example > 0) for kernel in total._kernels.values()}

    assert (LinearKernel, False) in kinds("mlp")
    assert {(ConvKernel, True)} < kinds("convolutions")
    assert {(ConvKernel, True), (ConvKernel, False)} < kinds("a convolution too large to keep")
    assert all((PerExampleKernel, True) in kinds(name) for name in ("grouped", "circular padding", "embedding"))
    assert LARGEST_KEPT < 64 * 460 * 9


@pytest.mark.parametrize("mode", ["ghost", "hooks"])
@pytest.mark.parametrize("name", ["mlp", "group norm"])
def test_clipped_sum_is_opacus_own(name, mode):
    from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping

    warnings.filterwarnings("ignore", message="Full backward hook")
    model, inputs, targets = built(name)
    expected = clipped(model, inputs, targets, 0.5)
    if mode == "hooks":
        private = GradSampleModule(model, loss_reduction="sum")
        losses(private, inputs, targets).sum().backward()
        samples = torch.cat([p.grad_sample.flatten(1) for p in model.parameters()], 1)
        found = (samples * (0.5 / samples.norm(dim=1)).clamp(max=1.0)[:, None]).sum(0)
    else:
        private = GradSampleModuleFastGradientClipping(model, max_grad_norm=0.5, loss_reduction="sum")
        each = losses(private, inputs, targets)
        each.sum().backward(retain_graph=True)
        factors = private.get_clipping_coef()
        private.zero_grad()
        private.disable_hooks()
        (factors * each).sum().backward()
        found = torch.cat([p.grad.flatten() for p in model.parameters()])
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("name", ["mlp", "sequence by Gram", "convolutions", "layers applied twice", "embedding"])
def test_any_split_into_micro_batches_gives_the_same_sum(name):
    model, inputs, targets = built(name)
    whole = clipped(model, inputs, targets, 0.5)
    for split in (1, 2, 5):
        torch.testing.assert_close(clipped(model, inputs, targets, 0.5, split), whole, rtol=1e-5, atol=1e-6)


def test_dropout_is_that_of_the_forward_pass():
    model = nn.Sequential(nn.Linear(5, 40), nn.Dropout(0.5), nn.Linear(40, 3))
    inputs, targets = torch.randn(SIZE, 5), torch.arange(SIZE) % 3
    torch.manual_seed(8)
    found = clipped(model, inputs, targets, 1e9)
    torch.manual_seed(8)
    expected = torch.autograd.grad(losses(model, inputs, targets).sum(), list(model.parameters()))
    torch.testing.assert_close(found, torch.cat([g.flatten() for g in expected]).double(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 1e38, 1e30])
@pytest.mark.parametrize("name", ["mlp", "sequence by Gram", "sequence by products", "convolutions", "grouped",
                                  "a convolution too large to keep", "layer norm", "a layer of one's own"])  # fmt: skip
def test_a_poisoned_example_contributes_nothing_or_at_most_the_clip_norm(name, poison):
    model, inputs, targets = built(name)
    hurt = inputs.clone()
    hurt[2].view(-1)[0] = poison
    kept = torch.arange(SIZE) != 2
    honest = clipped(model, inputs[kept], targets[kept], 0.5)
    found = clipped(model, hurt, targets, 0.5)
    assert bool(found.isfinite().all())
    share = float((found - honest).norm())
    if math.isfinite(poison):
        assert share <= 0.5 * (1 + 1e-4)
    else:  # the same numbers; a product of five rows may be computed otherwise than one of six
        assert share <= 2e-6
    alone = ClippedSum(model)
    alone.add(lambda: losses(model, hurt[2:3], targets[2:3]), 0.5)
    assert math.isfinite(poison) or not bool(alone.total.any())


@pytest.mark.parametrize("name", ["mlp", "sequence by products", "convolutions", "layer norm"])
def test_the_others_are_bit_for_bit_the_same_whatever_the_poison(name):
    model, inputs, targets = built(name)
    sums = []
    for poison in (math.nan, math.inf, -math.inf):
        hurt = inputs.clone()
        hurt[2] = poison
        sums.append(clipped(model, hurt, targets, 0.5))
    assert torch.equal(sums[0], sums[1]) and torch.equal(sums[1], sums[2])


@settings(max_examples=60, deadline=None)
@given(
    scale=st.floats(-12, 12).map(lambda e: 10.0**e),
    clip_norm=st.floats(-5, 5).map(lambda e: 10.0**e),
    name=st.sampled_from(["mlp", "sequence by Gram", "sequence by products", "convolutions", "layers applied twice"]),
)
def test_no_example_contributes_more_than_the_clip_norm(scale, clip_norm, name):
    model, inputs, targets = built(name)
    share = clipped(model, inputs[:1] * scale, targets[:1], clip_norm).double()
    assert bool(share.isfinite().all())
    assert float(share.norm()) <= clip_norm * (1 + NORM_MARGIN)


def test_the_error_of_large_sums_is_below_the_margin_of_the_noise():
    """One example more in a batch of a thousand that all pull the same way: the worst for a sum in fp32."""
    model, inputs, targets = built("mlp")
    rows = torch.zeros(1000, dtype=torch.long)
    many = clipped(model, inputs[rows], targets[rows], 0.1, split=256)
    more = clipped(model, inputs[[*rows, 1]], targets[[*rows, 1]], 0.1, split=256)
    _, exact = norms_and_sum(model, inputs[:1], targets[:1], 0.1)
    assert float((many.double() - more.double()).norm()) <= 0.1 * (1 + EXAMPLE_MARGIN)
    assert float((many.double() - 1000 * exact).norm()) / 0.1 < 1000 * NORM_MARGIN + EXAMPLE_MARGIN


@settings(max_examples=40, deadline=None)
@given(scale=st.floats(0, 12).map(lambda e: 10.0**e), seed=st.integers(0, 10**6), gram=st.booleans())
def test_positions_that_cancel_do_not_hide_an_example_from_the_clip_norm(scale, seed, gram):
    """A tiny gradient as the sum of huge products: its rounding error alone could exceed C, or its norm seem zero."""
    positions, features, outputs = (3, 40, 50) if gram else (20, 4, 3)
    torch.manual_seed(seed)
    model, rows = nn.Linear(features, outputs), torch.randn(1, positions, features) * scale
    rows[:, -1] -= rows.sum(1)
    total = ClippedSum(model)
    total.add(lambda: model(rows).sum((1, 2)), 1.0)
    assert float(total.total.double().norm()) <= 1 + EXAMPLE_MARGIN


def test_an_interrupted_step_leaves_nothing_behind():
    model, inputs, targets = built("convolutions")
    expected = clipped(model, inputs, targets, 0.5)
    total = ClippedSum(model)

    def failing() -> Tensor:
        losses(model, inputs, targets)
        raise RuntimeError("in the middle")

    total.add(lambda: losses(model, inputs[:3], targets[:3]), 0.5)
    with pytest.raises(RuntimeError, match="in the middle"):
        total.add(failing, 0.5)
    model(inputs)  # an evaluation in between is not recorded
    total.reset()
    total.add(lambda: losses(model, inputs, targets), 0.5)
    assert torch.equal(total.total, expected)


def test_norms_are_those_of_single_examples_and_an_empty_batch_has_none():
    model, inputs, targets = built("group norm")
    expected, _ = norms_and_sum(model, inputs, targets, 1.0)
    total = ClippedSum(model)
    found = total.add(lambda: losses(model, inputs, targets), 1.0)
    assert found.tolist() == pytest.approx(expected, rel=1e-4)
    before = total.total.clone()
    assert len(total.add(lambda: losses(model, inputs[:0], targets[:0]), 1.0)) == 0
    assert torch.equal(total.total, before)
