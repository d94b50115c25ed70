"""Private clients in stacks do the mathematics of single ones: step for step under insecure noise."""

from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from client_app.handler import handler_for
from client_app.weighted_sums import SUM_MARGIN
from fedplat.events import ClientFailed, read_events
from fedplat.federation import client_name
from fedplat.job import Job
from fedplat.model import read_arrays, write_arrays
from fedplat.streams import torch_stream
from fedplat.task import Examples, Split
from fedplat.tasks.digits import Digits
from fedplat.wire import Identity
from simulations.private_job import with_privacy_pinned
from simulations.private_vector import PrivateStackTrainer, StackBatch
from simulations.vector import ClientPlan
from simulations.vector_engine import why_not_vectorised

OPTIONS: dict[str, dict[str, object]] = {
    "plain": {},
    "momentum and weight decay": {"local__momentum": 0.9, "local__weight_decay": 0.01},
    "adam": {"local__optimizer": "adam", "local__lr": 0.01},
    "adamw": {"local__optimizer": "adamw", "local__lr": 0.01, "local__weight_decay": 0.1},
    "proximal term": {"local__proximal_mu": 0.5},
    "accumulation": {"local__accumulate": 3, "local__batch_size": 5},
    "own learning rates": {"local__lr_by_client": {"client-1": 0.02, "client-4": 0.5}},
    "adaptive clip norm": {"privacy__adaptive": {"lr": 0.5}},
    "truncated batches": {"privacy__max_batch": 6},
    "truncated and adaptive": {"privacy__max_batch": 6, "privacy__adaptive": {}},
    "batches that are often empty": {"privacy__sample_rate": 0.004},
    "batches that are always empty": {"privacy__sample_rate": 1e-9},
    "everybody in every batch": {"privacy__sample_rate": 1.0, "local__batch_size": 400},
    "a clip norm that clips nothing": {"privacy__clip_norm": 1e4, "privacy__noise_multiplier": 1e-5},
    "hardly any noise": {"privacy__noise_multiplier": 1e-4, "local__steps": 8},
}


class Augmented(Digits):
    def augment(self, inputs: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        return inputs + 0.1 * torch.randn(inputs.shape, generator=generator)


class Convolutional(Digits):
    """Through vmap, not through the hand-batched path."""

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(),
            nn.Flatten(), nn.Linear(144, 10),
        )  # fmt: skip


class Poisoned(Digits):
    """Every seventh example is NaN, every eleventh infinite, every thirteenth huge."""

    def data(self, split: Split) -> Examples:
        examples = super().data(split)
        for step, poison in ((7, torch.nan), (11, torch.inf), (13, 1e30)):
            examples.inputs[::step, 5] = poison
        return examples


class PoisonedConvolutional(Poisoned, Convolutional):
    pass


@pytest.fixture
def private_job(tiny_job):
    """Six clients of very different size."""

    def make(**settings: object) -> Job:
        defaults = {
            "data__partition": {"kind": "quantity", "alpha": 0.5, "min_examples": 2},
            "local__lr": 0.1, "local__batch_size": 16, "local__steps": 5,
            "privacy__unit": "sample", "privacy__noise_multiplier": 0.5, "privacy__sample_rate": 0.07,
            "privacy__clip_norm": 0.5, "privacy__insecure_noise": True,
        }  # fmt: skip
        return tiny_job(**(defaults | settings))

    return make


def identities(job: Job) -> list[Identity]:
    return [Identity(job.digest, 1, 0, client_name(i)) for i in range(job.cohort.clients)]


def plans_of(job: Job, handler) -> list[ClientPlan]:
    return [
        ClientPlan(
            torch.from_numpy(handler.data.rows(one.client).train),
            job.local.lr_by_client.get(one.client, job.local.lr),
            torch_stream(job.job.seed, "train", one.client, one.round),
        )
        for one in identities(job)
    ]


def one_by_one(job: Job, handler) -> list[tuple[dict[str, np.ndarray], int, float]]:
    """The reference: the handler's own trainer on each client."""
    start = read_arrays(handler.state)
    results = []
    for one, plan in zip(identities(job), plans_of(job, handler), strict=True):
        write_arrays(handler.state, start)
        result, reached = handler.fit(handler.data.train(one.client), plan.lr, one, clip_norm=job.privacy.clip_norm)
        results.append((read_arrays(handler.state), result.steps, reached))
    write_arrays(handler.state, start)
    return results


def assert_equal_law(job: Job) -> None:
    handler = handler_for(job.canonical())
    expected = one_by_one(job, handler)
    trainer = PrivateStackTrainer(job, handler.plan, handler.task, handler.model, handler.data.examples)
    randomness = handler.randomness(identities(job))
    found, clip_norms = trainer.train(plans_of(job, handler), randomness, job.privacy.clip_norm)
    assert found.steps == [steps for _, steps, _ in expected] and found.metrics == {}
    for client, (arrays, _, reached) in enumerate(expected):
        for name, array in arrays.items():
            stacked = found.parameters[name][client].numpy()
            assert np.isfinite(stacked).all()
            np.testing.assert_allclose(stacked, array, rtol=2e-4, atol=2e-5)
        assert clip_norms[client] == pytest.approx(reached, rel=1e-5)


@pytest.mark.parametrize("settings", OPTIONS.values(), ids=OPTIONS.keys())
def test_a_stack_of_ragged_private_clients_equals_one_by_one(settings, private_job):
    assert_equal_law(private_job(**settings))


@pytest.mark.parametrize("task", ["Augmented", "Convolutional", "Poisoned", "PoisonedConvolutional"])
@pytest.mark.parametrize("settings", ["plain", "adaptive clip norm", "batches that are often empty"])
def test_other_tasks_keep_the_law(task, settings, private_job):
    args = {"task__name": f"{__name__}:{task}", "task__args": {"hidden": 8}}
    # Serial micro-batches hold two batch sizes: augmentation draws the same numbers only if nothing is cut.
    assert_equal_law(private_job(**args, local__batch_size=40, **OPTIONS[settings]))


def test_frozen_layers_stay_out_of_the_stack(private_job):
    assert_equal_law(private_job(task__freeze=["0.*"]))
    assert_equal_law(private_job(task__freeze=["2.bias"]))


def test_the_steps_of_a_stack_are_the_plans_and_tell_nothing_of_sizes(private_job):
    job = private_job(local__steps=None, local__epochs=1, privacy__sample_rate=0.3)
    handler = handler_for(job.canonical())
    sizes = {len(plan.rows) for plan in plans_of(job, handler)}
    trainer = PrivateStackTrainer(job, handler.plan, handler.task, handler.model, handler.data.examples)
    found, _ = trainer.train(plans_of(job, handler), handler.randomness(identities(job)), 0.5)
    assert found.steps == [4] * 6 and len(sizes) > 3


def test_one_draw_over_everybodys_rows_is_poisson_sampling_of_each(private_job):
    """Secure stacks draw once for all rows: each row is in with probability q. 7 σ: no false alarm in 10⁷."""
    job = private_job(privacy__insecure_noise=False, privacy__sample_rate=0.3)
    handler = handler_for(job.canonical())
    trainer = PrivateStackTrainer(job, handler.plan, handler.task, handler.model, handler.data.examples)
    own = [plan.rows for plan in plans_of(job, handler)]
    rows, sizes = torch.cat(own), np.array([len(part) for part in own])
    counts = torch.zeros(len(handler.data.examples))
    for _ in range(400):
        batch = trainer._sample(rows, sizes, handler.randomness(identities(job)))
        padded, mask = batch.padded()
        for client, (row, real) in enumerate(zip(padded, mask.bool(), strict=True)):
            assert bool(torch.isin(row[real], own[client]).all()) and len(row[real].unique()) == int(real.sum())
            counts[row[real]] += 1
    assert float((counts - 120).abs().max()) < 7 * (400 * 0.3 * 0.7) ** 0.5
    assert abs(float(counts.mean()) - 120) < 6 * (400 * 0.3 * 0.7 / len(counts)) ** 0.5


@pytest.mark.parametrize("adaptive", [False, True])
def test_engines_agree_bit_for_bit_or_to_rounding_end_to_end(adaptive, private_job, simulated):
    """Process and serial: the same bits. Vector: the same numbers."""
    settings = {"privacy__adaptive": {}} if adaptive else {}
    models = {}
    for engine in ("serial", "process", "vector"):
        job = private_job(
            simulation__engine=engine, simulation__workers=1, job__rounds=2, cohort__fraction=1.0, **settings
        )
        run = simulated(job, engine)
        assert run.job().simulation.engine == engine
        models[engine] = _loaded(run.model_file)
    for name, array in models["serial"].items():
        np.testing.assert_array_equal(models["process"][name], array)
        np.testing.assert_allclose(models["vector"][name], array, rtol=1e-3, atol=1e-4)


def _loaded(path) -> dict[str, np.ndarray]:
    from safetensors.numpy import load_file

    return load_file(path)


class Telling(Digits):
    """Fails in training, and says why."""

    armed = False

    def loss(self, outputs, targets):
        if type(self).armed and outputs.requires_grad:
            raise ValueError("patient 4711 has gout")
        return super().loss(outputs, targets)


def test_a_task_that_fails_in_a_stack_fails_client_by_client_and_keeps_its_secret(private_job, simulated, monkeypatch):
    job = private_job(
        task__name=f"{__name__}:Telling", simulation__engine="vector", simulation__chunk=3, job__rounds=1,
        cohort__fraction=1.0, cohort__on_shortfall="skip",
    )  # fmt: skip
    job = with_privacy_pinned(job)
    handler_for(job.canonical())  # the model is checked before the task begins to fail
    monkeypatch.setattr(Telling, "armed", True)
    failed = [event for event in read_events(simulated(job).events_file) if isinstance(event, ClientFailed)]
    assert len(failed) == 6
    assert all("private training failed" in event.reason and "gout" not in event.reason for event in failed)


def test_a_stack_whose_gradients_would_not_fit_goes_one_by_one(private_job, monkeypatch):
    monkeypatch.setattr("simulations.vector_engine.MOST_ELEMENTS", 1000)
    large = private_job(task__name=f"{__name__}:Convolutional", task__args={})
    assert "per-example gradients of a stack" in (why_not_vectorised(large, handler_for(large.canonical())) or "")
    plain = private_job()  # an MLP never forms them
    assert why_not_vectorised(plain, handler_for(plain.canonical())) is None


class Seeded(Digits):
    """Remembers which seeds its augmentation was given."""

    seen: ClassVar[list[int]] = []

    def augment(self, inputs: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        type(self).seen.append(generator.initial_seed())
        return inputs


@pytest.mark.parametrize("engine", ["serial", "vector"])
@pytest.mark.parametrize("insecure", [False, True])
def test_private_augmentation_is_drawn_from_a_secret(engine, insecure, private_job, simulated, monkeypatch):
    """From the public seed a server could tell whose place in the batch has changed."""
    monkeypatch.setattr(Seeded, "seen", [])
    seeds = []
    for name in ("first", "second"):
        Seeded.seen.clear()
        simulated(
            private_job(
                task__name=f"{__name__}:Seeded", simulation__engine=engine, job__rounds=1, cohort__fraction=1.0,
                privacy__insecure_noise=insecure, privacy__sample_rate=0.5, privacy__epsilon=None,
            ), name,
        )  # fmt: skip
        probing = {torch.Generator().manual_seed(draw).initial_seed() for draw in range(8)}
        seeds.append(set(Seeded.seen) - probing)
    assert len(seeds[0]) == len(seeds[1]) == 6
    public = {torch_stream(0, "train", client_name(i), 1).initial_seed() for i in range(6)}
    assert (seeds[0] == seeds[1] == public) if insecure else not (seeds[0] & seeds[1] | seeds[0] & public)


class Exact(Digits):
    """A linear loss: an example's gradient is its input times its target, whoever else is in the batch."""

    stacked = True

    def model(self) -> nn.Module:
        layers = nn.Sequential(nn.Linear(64, 1))
        return layers if type(self).stacked else nn.Sequential(layers, nn.Identity())

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return outputs[:, 0] * (targets + 1)


class ExactByExample(Exact):
    stacked = False


@pytest.mark.parametrize("task", ["Exact", "ExactByExample"])
@pytest.mark.parametrize(("count", "error"), [(1400, 1e-6), (301, SUM_MARGIN), (300, SUM_MARGIN), (20, SUM_MARGIN)])
def test_one_example_more_moves_a_stacks_sum_by_itself_and_nothing_else(task, count, error, private_job):
    """In fp32 the rounding of a large sum moves too; up to 300 summands it is proven to be covered."""
    job = private_job(task__name=f"{__name__}:{task}", task__args={})
    handler = handler_for(job.canonical())
    trainer = PrivateStackTrainer(job, handler.plan, handler.task, handler.model, handler.data.examples)
    stack = {name: p.detach().unsqueeze(0) for name, p in handler.model.named_parameters()}

    def total(rows: torch.Tensor) -> torch.Tensor:
        flat = torch.zeros(1, 65, dtype=torch.float64)
        batch = StackBatch(rows, np.array([0]), np.array([len(rows)]))
        trainer._clipped_sums(stack, [], batch, torch.tensor([1.0]), flat)
        return flat

    rows = torch.arange(count)
    for row in (0, count // 2, count - 1):
        change = total(rows) - total(rows[rows != row])
        assert float((change - total(rows[[row]])).norm()) <= error
        assert float(change.norm()) <= 1 + error


class Duck:
    """A task that derives from nothing and augments nothing."""

    def __init__(self, data_dir, hidden: int = 8) -> None:
        self._digits = Digits(data_dir, hidden)

    def model(self) -> nn.Module:
        return self._digits.model()

    def data(self, split: Split) -> Examples:
        return self._digits.data(split)

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self._digits.loss(outputs, targets)

    def metrics(self, outputs: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        return self._digits.metrics(outputs, targets)


@pytest.mark.parametrize("private", [False, True])
def test_a_task_without_augmentation_runs_in_a_stack(private, private_job, tiny_job, simulated):
    make = private_job if private else tiny_job
    run = simulated(make(task__name=f"{__name__}:Duck", simulation__engine="vector", job__rounds=1))
    assert not [event for event in read_events(run.events_file) if isinstance(event, ClientFailed)]


def test_a_stacks_sums_are_float64_until_the_noise_is_in_them(private_job):
    """A sum that is rounded to fp32 before the noise moves by more than one example's share when one is added."""
    job = private_job()
    handler = handler_for(job.canonical())
    seen = []

    class Watched(PrivateStackTrainer):
        def _add_noise(self, flat, randomness, clip_norms, gradients):
            seen.append((flat.dtype, gradients.dtype))
            super()._add_noise(flat, randomness, clip_norms, gradients)

    trainer = Watched(job, handler.plan, handler.task, handler.model, handler.data.examples)
    trainer.train(plans_of(job, handler), handler.randomness(identities(job)), 0.5)
    assert set(seen) == {(torch.float64, torch.float32)}
