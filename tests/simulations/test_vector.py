"""The vector engine does the mathematics of the serial one, for every option and for ragged clients."""

import itertools

import numpy as np
import pytest
import torch
from torch import nn

from client_app.handler import handler_for
from client_app.local import LocalTrainer
from fedplat.federation import client_name
from fedplat.model import read_arrays, write_arrays
from fedplat.streams import torch_stream
from fedplat.task import Task
from fedplat.tasks.digits import Digits
from simulations.vector import ClientPlan, StackTrainer, stacked_forward
from simulations.vector_engine import why_not_vectorised

OPTIONS = {
    "plain sgd": {},
    "momentum and weight decay": {"momentum": 0.9, "weight_decay": 0.01},
    "adam": {"optimizer": "adam", "lr": 0.01},
    "adam with weight decay": {"optimizer": "adam", "lr": 0.01, "weight_decay": 0.1},
    "adamw": {"optimizer": "adamw", "lr": 0.01, "weight_decay": 0.1},
    "clipping": {"clip_norm": 0.05},
    "proximal term": {"proximal_mu": 0.5},
    "accumulation": {"accumulate": 3, "batch_size": 4},
    "several epochs": {"epochs": 3},
    "a number of steps": {"steps": 7},
    "everything at once": {"momentum": 0.5, "weight_decay": 0.01, "clip_norm": 0.3, "proximal_mu": 0.1, "epochs": 2,
                           "accumulate": 2, "batch_size": 8, "lr_by_client": {"client-1": 0.02, "client-4": 0.5}},
}  # fmt: skip


def job_with(tiny_job, **local):
    """Six clients of very different size (quantity skew), so that stacks are ragged in every way."""
    local = {"lr": 0.1, "batch_size": 10, **local}
    partition = {"kind": "quantity", "alpha": 0.5, "min_examples": 1}
    return tiny_job(data__partition=partition, **{f"local__{key}": value for key, value in local.items()})


def plans_of(job, handler) -> list[ClientPlan]:
    return [
        ClientPlan(
            torch.from_numpy(handler.data.rows(client_name(i)).train),
            job.local.lr_by_client.get(client_name(i), job.local.lr),
            torch_stream(job.job.seed, "law", i),
        )
        for i in range(job.cohort.clients)
    ]


def one_by_one(job, handler) -> list[tuple[dict[str, np.ndarray], int, float]]:
    """The reference: the real trainer on each client."""
    start = read_arrays(handler.state)
    trainer = LocalTrainer(job, handler.task, handler.model, handler.device)
    results = []
    for i, plan in enumerate(plans_of(job, handler)):
        write_arrays(handler.state, start)
        handler.model.train()
        done = trainer.train(handler.data.train(client_name(i)), plan.lr, plan.generator)
        results.append((read_arrays(handler.state), done.steps, done.metrics["loss"]))
    write_arrays(handler.state, start)
    return results


def assert_equal_law(job):
    handler = handler_for(job.canonical())
    expected = one_by_one(job, handler)
    found = StackTrainer(job, handler.task, handler.model, handler.data.examples).train(plans_of(job, handler))
    assert found.steps == [steps for _, steps, _ in expected]
    for client, (arrays, _, loss) in enumerate(expected):
        for name, array in arrays.items():
            np.testing.assert_allclose(found.parameters[name][client].numpy(), array, rtol=2e-4, atol=2e-5)
        assert float(found.metrics["loss"][client]) == pytest.approx(loss, rel=1e-4)


@pytest.mark.parametrize("local", OPTIONS.values(), ids=OPTIONS.keys())
def test_a_stack_of_ragged_clients_equals_one_by_one(local, tiny_job):
    assert_equal_law(job_with(tiny_job, **local))


class Augmented(Digits):
    def augment(self, inputs: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        return inputs + 0.1 * torch.randn(inputs.shape, generator=generator)


class Convolutional(Digits):
    """Goes through vmap, not through the hand-batched path; one layer is frozen in a test."""

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(),
            nn.Flatten(), nn.Linear(144, 10),
        )  # fmt: skip


class Headed(Digits):
    """Named losses from a model that returns a mapping."""

    loss_weights = {"digit": 1.0, "parity": 0.3}  # noqa: RUF012

    def model(self) -> nn.Module:
        class Two(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.body, self.digit, self.parity = nn.Linear(64, 8), nn.Linear(8, 10), nn.Linear(8, 2)

            def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
                hidden = self.body(x).tanh()
                return {"digit": self.digit(hidden), "parity": self.parity(hidden)}

        return Two()

    def loss(self, outputs, targets):
        cross_entropy = nn.functional.cross_entropy
        return {
            "digit": cross_entropy(outputs["digit"], targets, reduction="none"),
            "parity": cross_entropy(outputs["parity"], targets % 2, reduction="none"),
        }

    def metrics(self, outputs, targets):
        return super().metrics(outputs["digit"], targets)


@pytest.mark.parametrize("task", ["Augmented", "Convolutional", "Headed"])
def test_other_tasks_keep_the_law(task, tiny_job):
    job = job_with(tiny_job, epochs=2)
    named = job.task.model_copy(update={"name": f"{__name__}:{task}", "args": {}})
    assert_equal_law(job.model_copy(update={"task": named}))


def test_frozen_layers_stay_out_of_the_stack(tiny_job):
    job = job_with(tiny_job)
    frozen = job.task.model_copy(update={"freeze": ("0.*",)})
    assert_equal_law(job.model_copy(update={"task": frozen}))


def test_the_hand_batched_path_equals_vmap():
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(6, 5), nn.Tanh(), nn.Sequential(nn.Linear(5, 4, bias=False), nn.Tanh())
    )
    stack = {name: torch.randn(3, *p.shape) for name, p in model.named_parameters()}
    inputs = torch.randn(3, 7, 2, 3)
    one = [torch.func.functional_call(model, {n: s[i] for n, s in stack.items()}, (inputs[i],)) for i in range(3)]
    torch.testing.assert_close(stacked_forward(model)(stack, inputs), torch.stack(one))


class Stateful(Digits):
    layer: nn.Module = nn.BatchNorm1d(64)

    def model(self) -> nn.Module:
        return nn.Sequential(type(self).layer, nn.Linear(64, 10))


class Dropping(Stateful):
    layer = nn.Dropout(0.5)


class Branching(Digits):
    def model(self) -> nn.Module:
        class Branch(nn.Linear):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return super().forward(x if x.sum() > 0 else -x)

        return Branch(64, 10)


@pytest.mark.parametrize(
    ("task", "reason"),
    [("Stateful", "keeps statistics"), ("Dropping", "global random stream"), ("Branching", "can't be vectorised")],
)
def test_what_cannot_be_vectorised_is_detected_and_still_runs(task, reason, tiny_job, simulated):
    name = f"{__name__}:{task}"
    job = tiny_job(task__name=name, task__args={}, simulation__engine="vector", simulation__workers=1, job__rounds=1)
    assert reason in (why_not_vectorised(job, handler_for(job.canonical())) or "")
    run = simulated(job)
    assert run.job().simulation.engine == "process"
    assert run.model_file.exists()


@pytest.mark.parametrize(("key", "value"), [("precision", "bf16"), ("seconds", 1.0)])
def test_options_that_have_no_stacked_meaning_are_detected(key, value, tiny_job):
    job = tiny_job(**{f"local__{key}": value})
    assert why_not_vectorised(job, handler_for(job.canonical()))


def test_tasks_without_an_augment_hook_are_not_slowed_down(tiny_job):
    job = tiny_job()
    handler = handler_for(job.canonical())
    assert type(handler.task).augment is Task.augment
    assert StackTrainer(job, handler.task, handler.model, handler.data.examples)._augment is None


def test_options_cover_what_the_issue_promises():
    promised = {"momentum", "weight_decay", "optimizer", "proximal_mu", "clip_norm", "accumulate"}
    assert promised <= set(itertools.chain(*OPTIONS.values()))
