"""Local training against the same mathematics written by hand in torch."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from client_app.local import LocalResult, LocalTrainer, make_optimizer, step_batches
from fedplat.job import Job, validate_job
from fedplat.job_sections import LocalSection
from fedplat.task import Examples, Task

LAWS = settings(max_examples=25, deadline=None)
CPU = torch.device("cpu")
FEATURES, CLASSES = 5, 3


class Toy(Task):
    """A small classifier in the wanted precision."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.dtype = dtype

    def model(self) -> nn.Module:
        torch.manual_seed(11)
        return nn.Sequential(nn.Linear(FEATURES, 7), nn.Tanh(), nn.Linear(7, CLASSES)).to(self.dtype)

    def data(self, split: str) -> Examples:
        return self.examples(23)

    def examples(self, count: int) -> Examples:
        generator = torch.Generator().manual_seed(5)
        inputs = torch.randn(count, FEATURES, generator=generator, dtype=torch.float64).to(self.dtype)
        return Examples(inputs, torch.randint(CLASSES, (count,), generator=generator))

    def loss(self, outputs: Any, targets: Tensor) -> Tensor:
        return functional.cross_entropy(outputs, targets, reduction="none")

    def metrics(self, outputs: Any, targets: Tensor) -> dict[str, Tensor]:
        return {"accuracy": (outputs.argmax(1) == targets).float()}


DOUBLE = Toy(torch.float64)


def job_of(**local: Any) -> Job:
    return validate_job({"local": local}, "test")


def generator(seed: int = 3) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def train(job: Job, task: Task, count: int = 23, lr: float | None = None) -> tuple[nn.Module, LocalResult]:
    model = task.model()
    examples = task.examples(count)  # type: ignore[attr-defined]
    result = LocalTrainer(job, task, model, CPU).train(examples, lr or job.local.lr, generator())
    return model, result


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().double().flatten() for p in model.parameters()])


Penalty = Callable[[nn.Module], Tensor | float]


def by_hand(
    task: Toy,
    make: Callable[[Any], torch.optim.Optimizer],
    batch: int,
    epochs: int,
    count: int = 23,
    penalty: Penalty = lambda model: 0.0,
    clip_norm: float | None = None,
) -> nn.Module:
    """The textbook loop, with the same permutations."""
    model, examples, shuffle = task.model(), task.examples(count), generator()
    optimizer = make(model.parameters())
    for _ in range(epochs):
        for rows in torch.randperm(count, generator=shuffle).split(batch):
            optimizer.zero_grad()
            losses = functional.cross_entropy(model(examples.inputs[rows]), examples.targets[rows], reduction="none")
            (losses.sum() / len(rows) + penalty(model)).backward()
            if clip_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
            optimizer.step()
    return model


OPTIMIZERS: dict[str, tuple[dict[str, Any], Callable[[Any], torch.optim.Optimizer]]] = {
    "sgd": ({"optimizer": "sgd"}, lambda p: torch.optim.SGD(p, lr=0.3)),
    "sgd with momentum and decay": (
        {"optimizer": "sgd", "momentum": 0.9, "weight_decay": 0.01},
        lambda p: torch.optim.SGD(p, lr=0.3, momentum=0.9, weight_decay=0.01),
    ),
    "adam": ({"optimizer": "adam"}, lambda p: torch.optim.Adam(p, lr=0.3)),
    "adam with L2": (
        {"optimizer": "adam", "weight_decay": 0.1},
        lambda p: torch.optim.Adam(p, lr=0.3, weight_decay=0.1),
    ),
    "adamw": (
        {"optimizer": "adamw", "weight_decay": 0.1},
        lambda p: torch.optim.AdamW(p, lr=0.3, weight_decay=0.1),
    ),
    "adamw without decay": ({"optimizer": "adamw"}, lambda p: torch.optim.AdamW(p, lr=0.3, weight_decay=0)),
}


@pytest.mark.parametrize(("local", "make"), OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
@pytest.mark.parametrize("task", [Toy(), DOUBLE], ids=["fp32", "fp64"])
def test_optimiser_path_equals_a_hand_written_loop_bit_for_bit(
    task: Toy, local: dict[str, Any], make: Callable[[Any], torch.optim.Optimizer]
) -> None:
    model, result = train(job_of(lr=0.3, batch_size=4, epochs=3, **local), task)
    expected = by_hand(task, make, batch=4, epochs=3)
    assert torch.equal(weights(model), weights(expected))
    assert result.steps == 3 * 6


@LAWS
@given(st.integers(1, 6), st.integers(1, 5), st.integers(1, 23), st.sampled_from(["sgd", "adam"]))
def test_accumulating_k_batches_of_b_equals_batches_of_k_times_b(k: int, b: int, count: int, optimizer: str) -> None:
    common = {"lr": 0.1, "epochs": 2, "optimizer": optimizer, "clip_norm": 0.5, "proximal_mu": 0.1}
    accumulated, first = train(job_of(batch_size=b, accumulate=k, **common), DOUBLE, count)
    whole, second = train(job_of(batch_size=b * k, **common), DOUBLE, count)
    assert first.steps == second.steps
    torch.testing.assert_close(weights(accumulated), weights(whole), rtol=1e-9, atol=1e-9)
    assert first.metrics == pytest.approx(second.metrics, rel=1e-9)


@LAWS
@given(st.floats(1e-3, 10), st.sampled_from([None, 0.05]))
def test_proximal_step_equals_autograd_of_the_penalty(mu: float, clip_norm: float | None) -> None:
    start = [p.detach().clone() for p in DOUBLE.model().parameters()]

    def penalty(model: nn.Module) -> Tensor:
        return mu / 2 * sum((w - w0).square().sum() for w, w0 in zip(model.parameters(), start, strict=True))

    model, _ = train(job_of(lr=0.05, batch_size=4, epochs=3, proximal_mu=mu, clip_norm=clip_norm), DOUBLE)
    expected = by_hand(DOUBLE, lambda p: torch.optim.SGD(p, lr=0.05), 4, 3, penalty=penalty, clip_norm=clip_norm)
    torch.testing.assert_close(weights(model), weights(expected), rtol=1e-10, atol=1e-12)


def test_proximal_weight_of_the_strategy_is_the_one_used() -> None:
    local = {"lr": 0.05, "batch_size": 4, "epochs": 2}
    through_strategy = validate_job({"local": local, "server": {"args": {"proximal_mu": 0.7}}}, "test")
    assert torch.equal(
        weights(train(through_strategy, DOUBLE)[0]), weights(train(job_of(**local, proximal_mu=0.7), DOUBLE)[0])
    )


def test_a_stronger_proximal_term_keeps_the_model_nearer_to_its_start() -> None:
    start = weights(DOUBLE.model())
    distances = [
        float((weights(train(job_of(lr=0.05, batch_size=4, epochs=20, proximal_mu=mu), DOUBLE)[0]) - start).norm())
        for mu in (0.0, 0.5, 5.0)
    ]
    assert distances == sorted(distances, reverse=True)


@LAWS
@given(st.floats(1e-4, 10), st.floats(0.01, 2), st.integers(1, 3))
def test_clip_norm_bounds_every_step(clip_norm: float, lr: float, accumulate: int) -> None:
    job = job_of(lr=lr, steps=1, batch_size=4, accumulate=accumulate, clip_norm=clip_norm)
    step = weights(train(job, DOUBLE)[0]) - weights(DOUBLE.model())
    assert float(step.norm()) <= lr * clip_norm * (1 + 1e-6)


def test_clip_norm_that_is_never_reached_changes_nothing() -> None:
    free, _ = train(job_of(lr=0.1, batch_size=4), DOUBLE)
    clipped, _ = train(job_of(lr=0.1, batch_size=4, clip_norm=1e6), DOUBLE)
    assert torch.equal(weights(free), weights(clipped))


@LAWS
@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 4), st.integers(1, 5))
def test_epoch_limit_makes_exactly_that_many_passes(size: int, batch: int, accumulate: int, epochs: int) -> None:
    local = LocalSection(epochs=epochs, batch_size=batch, accumulate=accumulate)
    steps = list(step_batches(size, batch * accumulate, local, generator()))
    per_epoch = math.ceil(size / (batch * accumulate))
    assert len(steps) == epochs * per_epoch
    for epoch in range(epochs):
        seen = torch.cat(steps[epoch * per_epoch : (epoch + 1) * per_epoch])
        assert sorted(seen.tolist()) == list(range(size))


@LAWS
@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 50))
def test_step_limit_makes_exactly_that_many_steps_over_all_examples(size: int, batch: int, limit: int) -> None:
    steps = list(step_batches(size, batch, LocalSection(steps=limit), generator()))
    assert len(steps) == limit
    seen = torch.bincount(torch.cat(steps), minlength=size)
    assert int(seen.max()) - int(seen.min()) <= 1  # every example once before any comes again


@pytest.mark.parametrize(("local", "steps"), [({}, 6), ({"epochs": 2}, 12), ({"steps": 7}, 7), ({"steps": 1}, 1)])
def test_trainer_reports_the_steps_it_took(local: dict[str, Any], steps: int) -> None:
    assert train(job_of(batch_size=4, **local), Toy())[1].steps == steps


def test_more_steps_continue_the_path_of_fewer() -> None:
    def prefix(limit: int) -> list[list[int]]:
        return [rows.tolist() for rows in step_batches(10, 4, LocalSection(steps=limit), generator())]

    assert prefix(11)[:5] == prefix(5)


def test_time_limit_makes_at_least_one_step_and_ends() -> None:
    _, result = train(job_of(seconds=1e-9, batch_size=4), Toy())
    assert result.steps == 1
    assert train(job_of(seconds=0.05, batch_size=4), Toy())[1].steps >= 1


def test_time_limit_may_go_beyond_one_epoch() -> None:
    steps = step_batches(1, 1, LocalSection(seconds=60.0), generator())
    assert [next(steps).tolist() for _ in range(5)] == [[0]] * 5


def test_reported_loss_is_the_mean_over_examples_seen() -> None:
    task = DOUBLE
    examples = task.examples(23)
    _, result = train(job_of(batch_size=23, steps=1), task)
    with torch.no_grad():
        expected = float(task.loss(task.model()(examples.inputs), examples.targets).mean())
    assert result.metrics["loss"] == pytest.approx(expected, rel=1e-12)


def test_training_lowers_the_loss() -> None:
    _, first = train(job_of(batch_size=23, steps=1, lr=0.5), Toy())
    _, later = train(job_of(batch_size=23, steps=200, lr=0.5), Toy())
    assert later.metrics["loss"] < first.metrics["loss"]


def test_optimiser_state_is_fresh_for_every_client() -> None:
    """One resident trainer serves one client after another; momentum must not leak between them."""
    job, task = job_of(batch_size=4, lr=0.1, momentum=0.9), Toy()
    model = task.model()
    trainer, start = LocalTrainer(job, task, model, CPU), {k: v.clone() for k, v in model.state_dict().items()}
    results = []
    for _ in range(2):
        model.load_state_dict(start)
        trainer.train(task.examples(23), 0.1, generator())
        results.append(weights(model))
    assert torch.equal(*results)


def test_frozen_parameters_stay_and_the_others_move() -> None:
    task = Toy()
    model = task.model()
    model[0].requires_grad_(False)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    job = job_of(batch_size=4, lr=0.1, weight_decay=0.1, momentum=0.5, proximal_mu=0.1, clip_norm=1.0)
    LocalTrainer(job, task, model, CPU).train(task.examples(23), 0.1, generator())
    after = model.state_dict()
    assert torch.equal(after["0.weight"], before["0.weight"])
    assert not torch.equal(after["2.weight"], before["2.weight"])


class MultiTask(Toy):
    """Two named losses of which one is weighted."""

    loss_weights = {"l2": 0.5}  # noqa: RUF012

    def loss(self, outputs: Any, targets: Tensor) -> Any:
        return {"ce": super().loss(outputs, targets), "l2": outputs.square().sum(1)}


class OneSum(Toy):
    """The same objective as MultiTask, as one loss."""

    def loss(self, outputs: Any, targets: Tensor) -> Tensor:
        return super().loss(outputs, targets) + 0.5 * outputs.square().sum(1)


def test_named_losses_train_like_their_weighted_sum_and_are_reported_by_name() -> None:
    job = job_of(batch_size=4, epochs=2)
    many, named = train(job, MultiTask(torch.float64))
    one, _ = train(job, OneSum(torch.float64))
    torch.testing.assert_close(weights(many), weights(one), rtol=1e-12, atol=1e-12)
    assert named.metrics["loss"] == pytest.approx(named.metrics["ce"] + 0.5 * named.metrics["l2"])


class Augmented(Toy):
    """Adds noise from the generator it is given, and keeps what it was called with."""

    def __init__(self) -> None:
        super().__init__(torch.float64)
        self.calls: list[tuple[int, int]] = []

    def augment(self, inputs: Tensor, generator: torch.Generator) -> Tensor:
        self.calls.append((len(inputs), generator.initial_seed()))
        return inputs + torch.randn(inputs.shape, generator=generator, dtype=inputs.dtype)


def test_augmentation_sees_every_batch_and_the_clients_generator() -> None:
    task = Augmented()
    train(job_of(batch_size=4, epochs=2), task)
    assert task.calls == [(size, 3) for size in [4, 4, 4, 4, 4, 3] * 2]


def test_augmentation_is_deterministic_and_has_an_effect() -> None:
    job = job_of(batch_size=4, epochs=2)
    one, other = train(job, Augmented())[0], train(job, Augmented())[0]
    torch.rand(5)
    assert torch.equal(weights(one), weights(other))
    assert not torch.equal(weights(one), weights(train(job, DOUBLE)[0]))


def test_augmentation_does_not_change_the_stored_examples() -> None:
    task = Augmented()
    examples = task.examples(23)
    before = examples.inputs.clone()
    LocalTrainer(job_of(batch_size=4), task, task.model(), CPU).train(examples, 0.1, generator())
    assert torch.equal(examples.inputs, before)


def test_task_without_the_augment_hook_trains() -> None:
    class Bare:
        model, examples, loss, metrics, dtype = Toy.model, Toy.examples, Toy.loss, Toy.metrics, torch.float32

    assert train(job_of(batch_size=4), Bare())[1].steps == 6  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "kind"), [("sgd", torch.optim.SGD), ("adam", torch.optim.Adam), ("adamw", torch.optim.AdamW)]
)
def test_optimiser_is_the_one_named(name: str, kind: type) -> None:
    local = LocalSection.model_validate({"optimizer": name, "weight_decay": 0.25})
    optimizer = make_optimizer(local, list(nn.Linear(1, 1).parameters()), 0.125)
    assert type(optimizer) is kind
    assert optimizer.param_groups[0]["lr"] == 0.125
    assert optimizer.param_groups[0]["weight_decay"] == 0.25
