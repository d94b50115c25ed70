"""Tasks: the built-in ones have the shapes they promise; your own are found, judged and rehearsed by name."""

from pathlib import Path
from textwrap import dedent

import numpy as np
import pytest
import torch

from fedplat.device import default_device
from fedplat.errors import UsageError
from fedplat.evaluate import evaluate
from fedplat.job import Job, validate_job
from fedplat.task import Examples, Task, example_losses, rehearse
from fedplat.tasks import BUILT_IN, data_dir, load_task


def job_of(name: str, **args: object) -> Job:
    return validate_job({"task": {"name": name, "args": args}}, "test")


@pytest.mark.parametrize(("name", "total", "width", "classes"), [("digits", 1797, 64, 10), ("cancer", 569, 30, 2)])
def test_table_task_splits_are_disjoint_and_cover_the_table(name: str, total: int, width: int, classes: int) -> None:
    task = load_task(job_of(name))
    train, test = task.data("train"), task.data("test")
    assert len(train) + len(test) == total
    assert len(test) == round(0.2 * total)
    assert train.inputs.shape[1:] == test.inputs.shape[1:] == (width,)
    assert train.inputs.dtype == torch.float32
    assert train.targets.dtype == torch.int64
    assert set(train.targets.tolist()) == set(test.targets.tolist()) == set(range(classes))
    rows = [tuple(row) for row in torch.cat([train.inputs, test.inputs]).tolist()]
    assert len(set(rows)) == len(rows) == total  # no row of these tables is twice in it, so none is in both splits


@pytest.mark.parametrize("name", ["digits", "cancer"])
def test_split_is_part_of_the_task_and_not_of_chance(name: str) -> None:
    one = load_task(job_of(name)).data("test")
    np.random.seed(1)
    torch.manual_seed(1)
    other = load_task(job_of(name)).data("test")
    assert torch.equal(one.inputs, other.inputs)
    assert torch.equal(one.targets, other.targets)


@pytest.mark.parametrize("name", ["digits", "cancer"])
def test_built_in_task_passes_its_rehearsal(name: str) -> None:
    task = load_task(job_of(name, hidden=4))
    rehearse(task, name, task.data("train"))
    losses, parts = example_losses(task, task.model()(task.data("test").inputs), task.data("test").targets)
    assert losses.shape == (len(task.data("test")),)
    assert parts == {}


def test_cancer_inputs_are_scaled_to_order_one() -> None:
    inputs = load_task(job_of("cancer")).data("train").inputs
    assert inputs.mean(0).abs().max() < 1
    assert inputs.std(0).min() > 0.3
    assert inputs.std(0).max() < 3


def test_data_dir_is_the_jobs_then_the_environments_then_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDPLAT_DATA", raising=False)
    assert data_dir(Job()) == Path("data")
    monkeypatch.setenv("FEDPLAT_DATA", "/from/env")
    assert data_dir(Job()) == Path("/from/env")
    assert data_dir(validate_job({"data": {"dir": "/from/job"}}, "test")) == Path("/from/job")


OWN = """
    import torch
    from torch import nn
    from fedplat.task import Examples, Task

    class Line:
        '''Two named losses, no augment, not a subclass of Task.'''
        loss_weights = {"square": 2.0}

        def __init__(self, data_dir, slope: float = 1.0):
            self.slope = slope

        def model(self):
            return nn.Linear(1, 1)

        def data(self, split):
            x = torch.linspace(0, 1, 6).unsqueeze(1)
            return Examples(x, self.slope * x)

        def loss(self, outputs, targets):
            error = (outputs - targets).squeeze(1)
            return {"square": error.square(), "absolute": error.abs()}

        def metrics(self, outputs, targets):
            return {"near": ((outputs - targets).abs() < 0.1).float().squeeze(1)}

    class Untyped(Line):
        def __init__(self, data_dir, slope=1.0):
            super().__init__(data_dir, slope)

    class NoLoss:
        def __init__(self, data_dir): ...
        def model(self): ...
        def data(self, split): ...
        def metrics(self, outputs, targets): ...

    class SubclassWithoutMetrics(Task):
        def __init__(self, data_dir): ...
        def model(self): return nn.Linear(1, 1)
        def data(self, split): return Examples(torch.ones(6, 1), torch.ones(6, 1))
        def loss(self, outputs, targets): return (outputs - targets).square().squeeze(1)

    class MeanLoss(Line):
        def loss(self, outputs, targets):
            return (outputs - targets).square().mean()

    class MatrixLoss(Line):
        def loss(self, outputs, targets):
            return (outputs - targets).square()

    class PartOfWrongShape(Line):
        def loss(self, outputs, targets):
            return {"good": (outputs - targets).squeeze(1), "bad": (outputs - targets).mean()}

    class FloatMetric(Line):
        def metrics(self, outputs, targets):
            return {"near": 0.5}

    class NoLosses(Line):
        def loss(self, outputs, targets):
            return {}

    class Raises(Line):
        def loss(self, outputs, targets):
            raise RuntimeError("my mistake")

    class WrongModel(Line):
        def model(self):
            return nn.Linear(7, 1)

    not_a_class = 3
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A user's module with tasks, importable under a name of its own."""
    name = f"own_tasks_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(dedent(OWN))
    (tmp_path / f"{name}_broken.py").write_text("class Oops(:\n")
    (tmp_path / f"{name}_needs.py").write_text("import no_such_package_at_all\n")
    monkeypatch.syspath_prepend(tmp_path)
    return name


def test_own_class_is_constructed_with_the_jobs_arguments(own: str) -> None:
    task = load_task(job_of(f"{own}:Line", slope=3.0))
    rehearse(task, "Line", task.data("train"))
    assert torch.equal(task.data("train").targets, 3 * task.data("train").inputs)


def test_own_class_without_type_hints_takes_arguments(own: str) -> None:
    task = load_task(job_of(f"{own}:Untyped", slope=3.0))
    assert torch.equal(task.data("train").targets, 3 * task.data("train").inputs)


def test_named_losses_add_up_with_their_weights_and_a_loss_without_one_counts_once(own: str) -> None:
    task = load_task(job_of(f"{own}:Line"))
    outputs, targets = torch.tensor([[1.0], [2.0]]), torch.tensor([[0.5], [0.0]])
    total, parts = example_losses(task, outputs, targets)
    assert total.tolist() == [2 * 0.25 + 0.5, 2 * 4 + 2]
    assert {name: part.tolist() for name, part in parts.items()} == {"square": [0.25, 4.0], "absolute": [0.5, 2.0]}


def test_evaluation_reports_means_of_every_named_loss_and_metric(own: str) -> None:
    task = load_task(job_of(f"{own}:Line"))
    model = task.model()
    torch.nn.init.zeros_(model.weight)
    torch.nn.init.zeros_(model.bias)
    examples = task.data("test")
    measured = evaluate(model, task, examples, torch.device("cpu"))
    error = examples.targets.double()
    assert measured.num_examples == 6
    expected = {"square": error.square().mean(), "absolute": error.abs().mean(), "near": 1 / 6}
    expected["loss"] = 2 * expected["square"] + expected["absolute"]
    assert measured.metrics == pytest.approx({k: float(v) for k, v in expected.items()}, rel=1e-6)


def test_evaluation_does_not_depend_on_where_batches_end() -> None:
    task = load_task(job_of("digits", hidden=8))
    model, test = task.model(), task.data("train")
    assert len(test) > 1024
    whole = evaluate(model, task, test, default_device())
    halves = [evaluate(model, task, test[rows], default_device()) for rows in (slice(0, 500), slice(500, None))]
    weighted = sum(h.metrics["loss"] * h.num_examples for h in halves) / len(test)
    assert whole.metrics["loss"] == pytest.approx(weighted, rel=1e-6)


UNFINDABLE = {
    "typo": ("digts", "did you mean 'digits'"),
    "neither built in nor a reference": ("whatever", "package.module:Class"),
    "no such package": ("no_such_package:Task", "can't import no_such_package"),
    "no such class": ("{own}:Lime", "has no class Lime"),
    "not a class": ("{own}:not_a_class", "has no class not_a_class"),
    "its import is missing": ("{own}_needs:X", "no_such_package_at_all"),
    "its file is broken": ("{own}_broken:Oops", "can't import"),
    "no module": (":Class", ":Class"),
    "relative module": (".tasks:Class", ".tasks:Class"),
    "no class": ("{own}:", "{own}:"),
}


@pytest.mark.parametrize(("name", "message"), UNFINDABLE.values(), ids=UNFINDABLE.keys())
def test_task_that_can_not_be_found_is_refused_by_name(own: str, name: str, message: str) -> None:
    with pytest.raises(UsageError) as refusal:
        load_task(job_of(name.format(own=own)))
    assert message.format(own=own) in str(refusal.value)


def test_unknown_task_lists_the_built_in_ones() -> None:
    with pytest.raises(UsageError) as refusal:
        load_task(job_of("zzz"))
    assert all(name in str(refusal.value) for name in BUILT_IN)


@pytest.mark.parametrize(("name", "missing"), [("NoLoss", "loss()"), ("SubclassWithoutMetrics", "metrics()")])
def test_task_without_a_method_is_refused_and_the_method_named(own: str, name: str, missing: str) -> None:
    with pytest.raises(UsageError) as refusal:
        load_task(job_of(f"{own}:{name}"))
    assert f"missing {missing}" in str(refusal.value)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"slop": 1.0}, "task.args: unknown argument 'slop' (did you mean 'slope'?)"),
        ({"slope": "steep"}, "task.args.slope must be float"),
        ({"data_dir": "/etc"}, "data_dir is fedplat's to set"),
    ],
)
def test_wrong_argument_is_refused_before_the_task_is_made(own: str, args: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError) as refusal:
        load_task(job_of(f"{own}:Line", **args))
    assert message in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("MeanLoss", "'loss' must have one value per example, shape (2,), got ()"),
        ("MatrixLoss", "'loss' must have one value per example, shape (2,), got (2, 1)"),
        ("PartOfWrongShape", "'bad' must have one value per example"),
        ("FloatMetric", "'near' must have one value per example, shape (2,), got float"),
        ("NoLosses", "returned no losses"),
        ("Raises", "RuntimeError: my mistake"),
        ("WrongModel", "failed on its first two examples"),
    ],
)
def test_rehearsal_refuses_what_training_could_not_use(own: str, name: str, message: str) -> None:
    task = load_task(job_of(f"{own}:{name}"))
    with pytest.raises(UsageError) as refusal:
        rehearse(task, name, task.data("train"))
    assert message in str(refusal.value)


def test_default_augmentation_changes_nothing() -> None:
    task: Task = load_task(job_of("digits"))
    inputs = torch.rand(3, 64)
    assert torch.equal(task.augment(inputs, torch.Generator()), inputs)


@pytest.mark.parametrize(
    ("targets", "labels", "expected"),
    [
        (torch.tensor([1, 0]), None, [1, 0]),
        (torch.tensor([1, 0], dtype=torch.uint8), None, [1, 0]),
        (torch.tensor([1.0, 0.0]), None, None),
        (torch.tensor([[1], [0]]), None, None),
        (torch.tensor([1.0, 0.0]), np.array([5, 6]), [5, 6]),
        (torch.tensor([1, 0]), np.array([5, 6]), [5, 6]),
    ],
)
def test_partition_labels_are_the_given_ones_else_integer_targets(
    targets: torch.Tensor, labels: np.ndarray | None, expected: list[int] | None
) -> None:
    found = Examples(torch.zeros(2, 1), targets, labels).partition_labels()
    assert (None if found is None else found.tolist()) == expected
