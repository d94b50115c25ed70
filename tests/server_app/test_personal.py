"""Personal layers (FedPer): trained by each client, kept by it, judged with it; they never travel."""

import numpy as np
import pytest
import safetensors.numpy
import torch
from torch import nn

from client_app.app import app as client_app
from fedplat import wire
from fedplat.errors import UsageError
from fedplat.events import ClientTrained, Evaluated, RoundFinished, RoundStarted, read_events
from fedplat.job import validate_job
from fedplat.model import build_model, personal_state, read_arrays, travelling_state
from fedplat.plots import plot_comparison, plot_curves
from fedplat.rundir import RunDirectory
from fedplat.summary import summarise
from fedplat.task import Examples
from fedplat.tasks import load_task
from fedplat.tasks.classification import Classification
from server_app.checkpoint import CheckpointStore
from server_app.evaluation import GlobalModel
from server_app.run import resume_run, start_run
from simulations.local_grid import LocalGrid
from tests.server_app.test_scaffold import safetensors_equal, stop_at

CLIENTS, EACH, CLASSES = 6, 60, 4


class Permuted(Classification):
    """Every client sees the same inputs and calls their classes by other names: no shared head can be right."""

    def model(self):
        return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, CLASSES))

    def data(self, split):
        generator = np.random.default_rng(5)
        centres = 2 * generator.normal(size=(CLASSES, 8))
        inputs, targets = [], []
        for _ in range(CLIENTS):
            classes = generator.integers(CLASSES, size=EACH)
            inputs.append(centres[classes] + generator.normal(size=(EACH, 8)))
            targets.append(generator.permutation(CLASSES)[classes])
        x, y = np.concatenate(inputs).astype(np.float32), np.concatenate(targets)
        return Examples(torch.from_numpy(x), torch.from_numpy(y))


def job_of(personal=("3.*",), **sections):
    judged = {"server": not personal, "clients": 1.0}
    table = {
        "job": {"name": "personal", "rounds": 8},
        "task": {"name": f"{__name__}:Permuted", "personal": list(personal)},
        "data": {"holdout": 0.25, "partition": {"kind": "range"}},
        "cohort": {"clients": CLIENTS, "fraction": 1.0},
        "local": {"lr": 0.2, "batch_size": 15, "epochs": 2},
        "evaluation": judged,
    }
    return validate_job({key: table.get(key, {}) | sections.get(key, {}) for key in {*table, *sections}}, "test")


def grid_of(job):
    return LocalGrid(client_app, job.cohort.clients, {wire.JOB_KEY: job.canonical()})


@pytest.fixture
def run_of(tmp_path):
    def run(job, name="run"):
        directory = RunDirectory.create(tmp_path / name, job)
        start_run(job, grid_of(job), directory)
        return directory

    return run


def kept(run):
    """What every client keeps, from the last checkpoint."""
    states = CheckpointStore(run.checkpoints, 2).latest().clients
    return {client: wire.decode_arrays(state["fedplat.now"]) for client, state in states.items()}


def test_own_heads_are_right_where_a_shared_head_cant_be(run_of):
    own, shared = summarise(run_of(job_of(), "own")), summarise(run_of(job_of(personal=()), "shared"))
    assert own.final_on_clients("accuracy") > 0.8
    assert own.final_on_clients("accuracy") > shared.final_on_clients("accuracy") + 0.3


def test_personal_parameters_and_buffers_differ_between_clients_and_never_travel(run_of):
    run, shared = run_of(job_of(["1.*", "3.*"]), "own"), run_of(job_of(personal=()), "shared")
    heads = kept(run)
    names = {name for name in Permuted(None).model().state_dict() if name[0] in "13"}
    assert len(heads) == CLIENTS and all(set(head) == names for head in heads.values())
    for name in ("3.weight", "1.running_mean", "1.weight"):
        assert len({head[name].tobytes() for head in heads.values()}) == CLIENTS
    checkpoint = CheckpointStore(run.checkpoints, 2).latest()
    assert set(checkpoint.arrays) == {"0.weight", "0.bias"}
    travelling = sum(len(array.data) for array in wire.encode_arrays(checkpoint.arrays).values())
    rounds = [e for e in read_events(run.events_file) if isinstance(e, RoundFinished)]
    assert all(e.bytes_up == e.bytes_down == CLIENTS * travelling for e in rounds)
    assert summarise(run).bytes_up < summarise(shared).bytes_up


def test_model_file_leaves_personal_layers_out(run_of):
    """The server never had a trained one, and an untrained one under its name would be a trap."""
    saved = safetensors.numpy.load_file(run_of(job_of()).model_file)
    assert set(saved) == {name for name in Permuted(None).model().state_dict() if not name.startswith("3.")}


def test_a_client_that_never_trained_has_the_initial_head(run_of):
    job = job_of(job={"rounds": 1}, cohort={"fraction": 0.5})
    heads, initial = kept(run_of(job)), read_arrays(personal_state(build_model(job, load_task(job)), ("3.*",)))
    assert len(heads) == CLIENTS // 2
    assert not any(np.array_equal(head["3.weight"], initial["3.weight"]) for head in heads.values())


def test_without_server_evaluation_all_that_is_measured_is_the_clients(run_of, tmp_path):
    run = run_of(job_of())
    events = [e for e in read_events(run.events_file) if isinstance(e, Evaluated)]
    assert {e.where for e in events} == {"clients"} and len(events) == 8
    summary = summarise(run)
    shown = summary.as_json(1.0)
    assert shown["test_accuracy"] is None and shown["clients_accuracy"] == events[-1].metrics["accuracy"]
    assert shown["clients_loss"] == events[-1].metrics["loss"]
    plot_curves(summary, "accuracy", tmp_path / "curves.png")
    plot_comparison([summary, summary], "accuracy", tmp_path / "comparison.png")
    assert not run.best_file.exists()


@pytest.mark.parametrize(("kind", "skip"), [(RoundStarted, 0), (ClientTrained, 2), (RoundFinished, 0)])
@pytest.mark.parametrize("strategy", ["FedAvg", "FedAdam", "Scaffold"])
def test_killed_and_resumed_equals_never_stopped(strategy, kind, skip, run_of, tmp_path):
    job = job_of(["1.*", "3.*"], cohort={"fraction": 0.7}, server={"strategy": strategy, "checkpoint_every": 2})
    whole = run_of(job, "whole")
    broken = RunDirectory.create(tmp_path / "broken", job)
    with pytest.raises(KeyboardInterrupt):
        start_run(job, grid_of(job), broken, (stop_at(kind, 6, skip),))
    resume_run(grid_of(job), RunDirectory(broken.path))
    assert broken.model_file.read_bytes() == whole.model_file.read_bytes()
    last = "checkpoints/round-000008/clients.safetensors"
    assert safetensors_equal(broken.path / last, whole.path / last)


def test_scaffold_corrects_what_travels_and_leaves_personal_layers_alone(run_of):
    run = run_of(job_of(server={"strategy": "Scaffold"}))
    controls = {name for name in CheckpointStore(run.checkpoints, 2).latest().arrays if name.startswith(wire.CONTROL)}
    assert controls == {"scaffold/0.weight", "scaffold/0.bias", "scaffold/1.weight", "scaffold/1.bias"}
    assert summarise(run).final_on_clients("accuracy") > 0.8


# --- what can't be ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("evaluation", "personal"),
    [
        ({"server": True, "clients": 1.0}, ["3.*"]),
        ({"server": False, "clients": 0.0}, ["3.*"]),
        ({"server": True, "clients": 0.0}, ["3.*"]),
    ],
)
def test_personal_layers_are_judged_at_clients_only(evaluation, personal):
    with pytest.raises(
        UsageError, match=r"task\.personal needs evaluation\.server = false and evaluation\.clients > 0"
    ):
        job_of(personal, evaluation=evaluation)


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (
            {"personal": ["3.*", "head.*"]},
            r"task\.personal: 'head\.\*' matches no parameter\. The model has: 0\.weight",
        ),
        ({"personal": ["3.*"], "freeze": ["3.bias"]}, r"3\.bias: frozen and personal at once"),
        ({"personal": ["*"]}, "leaves nothing to travel"),
        ({"personal": ["1.*", "3.*"], "freeze": ["0.*"]}, "leaves nothing to travel"),
    ],
)
def test_patterns_that_cant_be_followed_are_refused_before_anything_starts(task, message):
    job = job_of(task=task)
    for build in (build_model, GlobalModel):
        with pytest.raises(UsageError, match=message):
            build(job, load_task(job))


def test_travelling_frozen_and_personal_are_disjoint_and_make_up_the_model():
    job = job_of(["3.*"], task={"freeze": ["1.running_*"]})
    model = build_model(job, load_task(job))
    travels = set(travelling_state(model, job.task.freeze, job.task.personal))
    stays = set(personal_state(model, job.task.personal))
    assert not travels & stays
    assert set(model.state_dict()) - travels - stays == {"1.running_mean", "1.running_var"}


@pytest.mark.parametrize(
    ("sections", "uses"),
    [
        ({}, True),
        ({"personal": ()}, False),
        ({"personal": (), "server": {"strategy": "Scaffold"}}, True),
        ({"personal": (), "server": {"strategy": "FedAdam"}}, False),
    ],
)
def test_a_job_says_whether_its_clients_keep_state(sections, uses):
    assert job_of(**sections).uses_client_state is uses
