"""Which models can be trained with per-example privacy: what couples, hides or remembers examples is refused."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from client_app.handler import Handler
from client_app.private_model import require_private_model, require_separate_metrics
from fedplat.errors import UsageError
from fedplat.model import build_model
from fedplat.task import Examples, Task
from fedplat.tasks.classification import Classification
from fedplat.tasks.digits import Digits


def task_of(**hooks) -> Task:
    return type("Own", (Classification,), hooks)(Path())


def examples_of(*shape: int) -> Examples:
    return Examples(torch.randn(8, *shape), torch.arange(8) % 3)


def judge(model: nn.Module, *shape: int, freeze: tuple[str, ...] = (), task: Task | None = None) -> None:
    require_private_model(model, task or task_of(), examples_of(*shape or (6,)), freeze)


class Written(nn.Module):
    """Two layers with something written between them."""

    def __init__(self, between=lambda self, h: h) -> None:
        super().__init__()
        self.first, self.second, self.between = nn.Linear(6, 8), nn.Linear(8, 3), between
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.between(self, self.first(x)))


def remember(self: Written, h: Tensor) -> Tensor:
    self.seen.lerp_(h.detach().mean(0), 0.1)
    return h


def straight_through(self: Written, h: Tensor) -> Tensor:
    mean = h.mean(0)
    return h + mean - mean.detach()  # nothing to see in the losses, only in gradients


def reordered(self: Written, h: Tensor) -> Tensor:
    """Second layer sees the rows in another order (as with sequences sorted by length), then they are put back."""
    order = h[:, 0].argsort()
    return self.second(h[order].relu())[order.argsort()]


class Reordering(Written):
    def forward(self, x: Tensor) -> Tensor:
        return reordered(self, self.first(x))


class TimeFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.step, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.step(x.transpose(0, 1)).tanh().mean(0))


class Recurrent(nn.Module):
    def __init__(self, kind: type = nn.LSTM) -> None:
        super().__init__()
        self.recurrent, self.head = kind(6, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.recurrent(x)[0][:, -1])


class ByKeyword(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.line(input=x)


def norm(layer: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), layer, nn.ReLU(), nn.Linear(8, 3))


def images(layer: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), layer, nn.Flatten(), nn.Linear(64, 3))


def coupled(self: Written, h: Tensor) -> Tensor:
    return (h - h.mean(0)) / (h.std(0) + 1e-3)


def used_elsewhere(self: Written, h: Tensor) -> Tensor:
    return h + functional.linear(h, self.second.weight.t() @ self.second.weight)


REFUSED = {
    "batch norm": (lambda: norm(nn.BatchNorm1d(8)), (6,), r"layer '1' \(BatchNorm1d\).*convert_model"),
    "batch norm without parameters": (lambda: norm(nn.BatchNorm1d(8, affine=False)), (6,), "layer '1'"),
    "batch norm without statistics": (
        lambda: norm(nn.BatchNorm1d(8, affine=False, track_running_stats=False)), (6,), "layer '1'"),
    "instance norm with statistics": (
        lambda: images(nn.InstanceNorm2d(4, track_running_stats=True)), (1, 6, 6), "layer '1'.*InstanceNorm2d"),
    "statistics of the batch in forward": (lambda: Written(coupled), (6,), "depends on others in its batch"),
    "coupling that only gradients show": (lambda: Written(straight_through), (6,), "depends on others in its batch"),
    "a buffer that remembers": (lambda: Written(remember), (6,), "buffer 'seen' changes"),
    "a parameter used outside of its layer": (lambda: Written(used_elsewhere), (6,), "parameter 'second.weight'"),
    "rows in another order": (lambda: Reordering(), (6,), "reorder its batch"),
    "time first": (lambda: TimeFirst(), (5, 6), r"layer 'step' \(Linear\) does not have the batch along"),
    "time first, as long as the probe": (lambda: TimeFirst(), (4, 6), "does not have the batch along|come out wrong"),
    "lstm": (lambda: Recurrent(), (5, 6), "LSTM"),
    "attention": (lambda: nn.Sequential(nn.MultiheadAttention(6, 2)), (6,), "MultiheadAttention"),
    "a layer called by keyword": (lambda: ByKeyword(), (6,), "layer 'line'"),
    "a model that needs two examples": (
        lambda: Written(lambda self, h: functional.group_norm(h[:, :, None], 8).flatten(1)), (6,),
        "fails on a batch of one"),
    "weight norm": (
        lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(6, 3))), (6,), "can't be|not possible"),
}  # fmt: skip


@pytest.mark.parametrize(("make", "shape", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_a_model_that_would_leak_is_refused(make, shape, message):
    torch.manual_seed(0)
    with pytest.raises(UsageError, match=message):
        judge(make(), *shape)


def test_tied_parameters_are_refused():
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3))
    model[1].weight = model[0].weight
    with pytest.raises(UsageError, match=r"'1.weight' is shared with layer '0'.*tied parameters"):
        judge(model)


ACCEPTED = {
    "mlp": (lambda: Written(), (6,)),
    "group norm": (lambda: images(nn.GroupNorm(2, 4)), (1, 6, 6)),
    "instance norm": (lambda: images(nn.InstanceNorm2d(4)), (1, 6, 6)),
    "dropout": (lambda: norm(nn.Dropout(0.5)), (6,)),
    "a layer applied twice": (lambda: Written(lambda self, h: self.first(h[:, :6])), (6,)),
    "padding of another kind": (
        lambda: nn.Sequential(nn.Conv2d(1, 4, 3, padding_mode="circular", padding=1), nn.Flatten(), nn.Linear(144, 3)),
        (1, 6, 6)),
}  # fmt: skip


@pytest.mark.parametrize(("make", "shape"), ACCEPTED.values(), ids=ACCEPTED.keys())
def test_a_model_whose_examples_stay_apart_is_accepted_and_left_as_it_was(make, shape):
    torch.manual_seed(0)
    model = make()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    judge(model, *shape)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize(("freeze", "accepted"), [(("1.weight", "1.bias"), False), (("1.*",), True)])
def test_a_frozen_batch_norm_is_accepted_only_if_its_statistics_are_frozen_too(freeze, accepted):
    model = norm(nn.BatchNorm1d(8))
    model[1].requires_grad_(False)
    if accepted:
        judge(model, freeze=freeze)
    else:
        with pytest.raises(UsageError, match="layer '1'"):
            judge(model, freeze=freeze)


def mixup(self, inputs: Tensor, generator: torch.Generator) -> Tensor:
    return 0.7 * inputs + 0.3 * inputs[torch.randperm(len(inputs), generator=generator)]


def mixup_sometimes(self, inputs: Tensor, generator: torch.Generator) -> Tensor:
    is_mixed = float(torch.rand(1, generator=generator)) < 0.5
    return mixup(self, inputs, generator) if is_mixed else inputs


def balanced(self, outputs: Tensor, targets: Tensor) -> Tensor:
    """Rare classes of the batch weigh more: a neighbour's target shows."""
    share = (targets.unsqueeze(0) == targets.unsqueeze(1)).float().mean(1)
    return functional.cross_entropy(outputs, targets, reduction="none") / share


def centred(self, outputs: Tensor, targets: Tensor) -> Tensor:
    losses = functional.cross_entropy(outputs, targets, reduction="none")
    return losses - losses.mean() / 2


@pytest.mark.parametrize(
    "hooks", [{"augment": mixup}, {"augment": mixup_sometimes}, {"loss": balanced}, {"loss": centred}]
)
def test_a_task_that_mixes_examples_is_refused(hooks):
    torch.manual_seed(0)
    with pytest.raises(UsageError, match="depends on others in its batch"):
        judge(Written(), task=task_of(**hooks))


def test_an_augmentation_of_single_examples_is_accepted():
    def jitter(self, inputs: Tensor, generator: torch.Generator) -> Tensor:
        return inputs + torch.randn(inputs.shape, generator=generator)

    judge(Written(), task=task_of(augment=jitter))


@pytest.mark.parametrize("kept", ["float", "integer"])
def test_the_verdict_does_not_depend_on_how_many_examples_there_are(kept):
    words = nn.Sequential(nn.Embedding(9, 6), nn.Flatten(), nn.Linear(12, 3))
    inputs = torch.randn(1, 6) if kept == "float" else torch.randint(0, 9, (1, 2))
    require_private_model(Written() if kept == "float" else words, task_of(), Examples(inputs, torch.tensor([1])), ())


class Normed(Digits):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(64, 64), nn.Unflatten(1, (16, 2, 2)), nn.BatchNorm2d(16), nn.Flatten(),
                             nn.Linear(64, 10))  # fmt: skip


@pytest.mark.parametrize("convert", [False, True])
def test_a_model_is_converted_only_on_request(convert, tiny_job):
    job = tiny_job(
        task__name=f"{__name__}:Normed", task__args={},
        privacy__unit="sample", privacy__noise_multiplier=1.0, privacy__convert_model=convert,
    )  # fmt: skip
    task = Normed(Path())
    model = build_model(job, task)
    if convert:
        require_private_model(model, task, task.data("train"), ())
        assert any(isinstance(module, nn.GroupNorm) for module in model.modules())
    else:
        with pytest.raises(UsageError, match=r"layer '2' \(BatchNorm2d\)"):
            require_private_model(model, task, task.data("train"), ())


def test_a_converted_lstm_is_refused_because_it_lists_its_parameters_twice():
    from opacus.validators import ModuleValidator

    with pytest.raises(UsageError, match=r"'recurrent.l0.ih.weight' is shared with layer 'recurrent'"):
        judge(ModuleValidator.fix(Recurrent()), 5, 6)


def by_share(self, outputs: Tensor, targets: Tensor) -> Tensor:
    """Class weights from the batch itself (scikit-learn's "balanced")."""
    counts = torch.bincount(targets, minlength=3).float()
    return (len(targets) / counts)[targets] * functional.cross_entropy(outputs, targets, reduction="none")


def by_size(self, outputs: Tensor, targets: Tensor) -> Tensor:
    """A mean in disguise: the same whatever the others are, but not however many they are."""
    return functional.cross_entropy(outputs, targets, reduction="none") / len(targets)


def by_float_share(self, outputs: Tensor, targets: Tensor) -> Tensor:
    weight = (targets == 0).sum() / (targets == 1).sum().clamp(min=1)
    return functional.binary_cross_entropy_with_logits(outputs[:, 0], targets, reduction="none") * (
        1 + weight * targets
    )


SAME_CLASS_ROWS = {
    "every third": torch.arange(1000) % 3,  # rows 0, 333, 666 and 999 share a class
    "one class only": torch.zeros(1000, dtype=torch.long),
    "another class only": torch.full((1000,), 2),
    "one of another": torch.tensor([0] * 500 + [1] + [0] * 499),
}


@pytest.mark.parametrize("targets", SAME_CLASS_ROWS.values(), ids=SAME_CLASS_ROWS.keys())
@pytest.mark.parametrize("loss", [by_share, by_size])
def test_a_loss_that_looks_at_the_batch_is_refused_whatever_classes_the_first_rows_have(loss, targets):
    examples = Examples(torch.randn(1000, 6), targets)
    require_private_model(nn.Sequential(nn.Linear(6, 3)), task_of(), examples, ())
    with pytest.raises(UsageError, match="the loss of one example depends on others in its batch"):
        require_private_model(nn.Sequential(nn.Linear(6, 3)), task_of(loss=loss), examples, ())


def test_floating_point_classes_are_told_apart_too():
    examples = Examples(torch.randn(1000, 6), (torch.arange(1000) % 3 == 1).float())
    with pytest.raises(UsageError, match="depends on others in its batch"):
        require_private_model(nn.Linear(6, 1), task_of(loss=by_float_share), examples, ())


def test_targets_of_any_shape_and_kind_are_probed():
    def squares(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets.float()).square().flatten(1).mean(1)

    model = nn.Linear(6, 5)
    for targets in (torch.randn(9, 5), torch.zeros(9, 5), torch.randint(0, 4, (9, 5)), torch.full((9, 5), -100)):
        require_private_model(model, task_of(loss=squares), Examples(torch.randn(9, 6), targets), ())


def share_of_best(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
    return {"score": (outputs[:, 0] / outputs[:, 0].abs().max()).abs()}


def centred(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
    return {"score": outputs[:, 0] - outputs[:, 0].mean()}


def diluted(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
    return {"score": (outputs.argmax(1) == targets).float() / len(targets)}


@pytest.mark.parametrize("metrics", [share_of_best, centred, diluted])
def test_a_metric_that_looks_at_the_batch_is_not_released(metrics):
    examples = examples_of(6)
    require_separate_metrics(nn.Linear(6, 3), task_of(), examples)
    with pytest.raises(UsageError, match="metric 'score' of one example depends on others"):
        require_separate_metrics(nn.Linear(6, 3), task_of(metrics=metrics), examples)


def test_a_loss_that_is_only_coupled_in_evaluation_is_not_released():
    model = Written(lambda self, h: h if self.training else h - h.mean(0))
    require_private_model(model, task_of(), examples_of(6), ())
    with pytest.raises(UsageError, match="metric 'loss' of one example depends on others"):
        require_separate_metrics(model, task_of(), examples_of(6))


class Scored(Digits):
    """Digits with a metric that every other example moves."""

    def metrics(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return share_of_best(self, outputs, targets)


def test_a_job_that_would_release_such_a_metric_is_refused(tiny_job):
    privacy = {"unit": "sample", "sample_rate": 0.2, "noise_multiplier": 2.0, "evaluation_noise": 5.0}
    private = {f"privacy__{key}": value for key, value in privacy.items()}
    common = {"task__name": f"{__name__}:Scored", "data__holdout": 0.2, "evaluation__metric": "loss"}
    with pytest.raises(UsageError, match="metric 'score' of one example depends on others"):
        Handler(tiny_job(**common, evaluation__clients=0.5, **private))
