"""SCAFFOLD against a hand-written reading of the paper's Algorithm 1, against FedAvg, and against being killed."""

import numpy as np
import pytest
import safetensors.numpy
import torch
from flwr.app import Message, RecordDict
from torch import nn

from client_app.app import app as client_app
from fedplat import wire
from fedplat.errors import UsageError
from fedplat.events import ClientTrained, RoundFinished, RoundStarted, read_events
from fedplat.federation import FederationData, client_name
from fedplat.flower import become_server
from fedplat.model import build_model, read_arrays
from fedplat.rundir import RunDirectory
from fedplat.streams import torch_stream
from fedplat.summary import summarise
from fedplat.tasks import load_task
from server_app.checkpoint import CheckpointStore
from server_app.cohort import CohortGrid, sample_cohort
from server_app.run import resume_run, start_run
from server_app.scaffold import Scaffold
from server_app.strategies import build_strategy
from simulations.local_grid import LocalGrid

SHARDS = {"kind": "shards", "per_client": 1}


def grid_of(job):
    return LocalGrid(client_app, job.cohort.clients, {wire.JOB_KEY: job.canonical()})


@pytest.fixture
def run_of(tmp_path):
    """Run a job to its end on virtual clients."""

    def run(job, name="run"):
        directory = RunDirectory.create(tmp_path / name, job)
        start_run(job, grid_of(job), directory)
        return directory

    return run


@pytest.fixture
def scaffold_job(tiny_job):
    def make(**settings):
        return tiny_job(**{"server__strategy": "Scaffold", "data__partition": SHARDS, "local__epochs": 2, **settings})

    return make


def arrays_of(run):
    return CheckpointStore(run.checkpoints, 2).latest().arrays


def model_of(run):
    return safetensors.numpy.load_file(run.model_file)


# --- the paper ----------------------------------------------------------------------------------


class Paper:
    """Algorithm 1, option II, in plain torch: no fedplat code but the data, the initial model and the shuffles."""

    def __init__(self, job):
        self.job, self.task = job, load_task(job)
        self.data = FederationData(job, self.task)
        self.model = build_model(job, self.task)
        self.x = [p.detach().clone() for p in self.model.parameters()]
        self.c = [torch.zeros_like(p) for p in self.x]
        self.own = {}

    def round(self, number, global_lr=1.0):
        job = self.job
        names = [client_name(i) for i in range(job.cohort.clients)]
        chosen = sample_cohort(names, job.cohort.cohort_size, job.job.seed, "cohort", number)
        sizes = {name: len(self.data.train(name)) for name in chosen}
        total = sum(sizes.values())
        mean_y = [torch.zeros_like(p, dtype=torch.float64) for p in self.x]
        mean_change = [torch.zeros_like(p, dtype=torch.float64) for p in self.x]
        for name in chosen:
            y, change = self.client(name, number)
            for i in range(len(self.x)):
                mean_y[i] += sizes[name] / total * y[i]
                mean_change[i] += sizes[name] / total * change[i]
        for i, x in enumerate(self.x):
            self.x[i] = (x + global_lr * (mean_y[i] - x)).float()
            self.c[i] = (self.c[i] + len(chosen) / len(names) * mean_change[i]).float()

    def client(self, name, number):
        local, examples = self.job.local, self.data.train(name)
        own = self.own.get(name, [torch.zeros_like(p) for p in self.x])
        y = [x.clone().requires_grad_() for x in self.x]
        generator, steps = torch_stream(self.job.job.seed, "train", name, number), 0
        for _ in range(local.epochs):
            for rows in torch.randperm(len(examples), generator=generator).split(local.batch_size):
                output = torch.func.functional_call(self.model, self.named(y), (examples.inputs[rows],))
                loss = nn.functional.cross_entropy(output, examples.targets[rows])
                gradients = torch.autograd.grad(loss, y)
                with torch.no_grad():
                    for p, g, own_c, c in zip(y, gradients, own, self.c, strict=True):
                        p -= local.lr * (g + local.weight_decay * p - own_c + c)
                steps += 1
        renewed = [
            (own_c - c + (x - p.detach()) / (steps * local.lr))
            for own_c, c, x, p in zip(own, self.c, self.x, y, strict=True)
        ]
        self.own[name] = renewed
        return [p.detach() for p in y], [new - old for new, old in zip(renewed, own, strict=True)]

    def named(self, values):
        return dict(zip(dict(self.model.named_parameters()), values, strict=True))


@pytest.mark.parametrize(
    "settings",
    [
        {"cohort__clients": 1, "cohort__fraction": 1.0, "data__partition": {"kind": "iid"}},
        {"cohort__fraction": 1.0},
        {"cohort__fraction": 0.5, "server__args": {"global_lr": 0.7}},
        {"cohort__fraction": 0.5, "data__partition": {"kind": "dirichlet", "alpha": 0.2}, "local__weight_decay": 0.01},
    ],
    ids=["one client with all data", "all clients", "half of them, global_lr 0.7", "unequal sizes, weight decay"],
)
def test_scaffold_is_the_papers_algorithm(settings, scaffold_job, run_of):
    job = scaffold_job(job__rounds=5, **settings)
    paper, arrays = Paper(job), arrays_of(run_of(job))
    for number in range(1, 6):
        paper.round(number, job.server.args.get("global_lr", 1.0))
    for name, expected in paper.named(paper.x).items():
        np.testing.assert_allclose(arrays[name], expected, atol=2e-5)
    for name, expected in paper.named(paper.c).items():
        np.testing.assert_allclose(arrays[wire.CONTROL + name], expected, atol=2e-4)


def test_with_all_clients_c_is_the_weighted_mean_of_the_clients_own(scaffold_job, run_of):
    job = scaffold_job(cohort__fraction=1.0, data__partition={"kind": "dirichlet", "alpha": 0.3})
    checkpoint = CheckpointStore(run_of(job).checkpoints, 2).latest()
    data = FederationData(job, load_task(job))
    weights = {name: len(data.train(name)) / len(data.examples) for name in checkpoint.clients}
    own = {name: wire.decode_arrays(state["fedplat.now"]) for name, state in checkpoint.clients.items()}
    assert len(own) == job.cohort.clients
    for name, c in checkpoint.arrays.items():
        if name.startswith(wire.CONTROL):
            mean = sum(weights[client] * own[client][name].astype(np.float64) for client in own)
            np.testing.assert_allclose(c, mean, atol=1e-5)


# --- beside FedAvg ------------------------------------------------------------------------------


def test_first_round_equals_fedavg_bit_for_bit(scaffold_job, run_of):
    job = scaffold_job(job__rounds=1)
    averaged = job.model_copy(update={"server": job.server.model_copy(update={"strategy": "FedAvg"})})
    ours, theirs = model_of(run_of(job, "scaffold")), model_of(run_of(averaged, "fedavg"))
    assert ours.keys() == theirs.keys()
    assert all(np.array_equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_on_strongly_skewed_data_scaffold_reaches_a_lower_loss_than_fedavg(seed, scaffold_job, run_of):
    settings = {"job__seed": seed, "job__rounds": 30, "local__epochs": 5, "local__lr": 0.1, "cohort__clients": 10}
    job = scaffold_job(**settings, cohort__fraction=1.0, local__batch_size=16)
    averaged = job.model_copy(update={"server": job.server.model_copy(update={"strategy": "FedAvg"})})
    ours, theirs = (summarise(run_of(j, j.server.strategy)).final("loss") for j in (job, averaged))
    assert ours < 0.8 * theirs, (ours, theirs)


# --- what travels, what is kept -----------------------------------------------------------------


def test_model_file_holds_the_model_and_messages_twice_as_much(scaffold_job, run_of):
    job = scaffold_job()
    run = run_of(job)
    names = set(read_arrays(build_model(job, load_task(job)).state_dict()))
    assert set(model_of(run)) == set(safetensors.numpy.load_file(run.best_file)) == names
    assert set(arrays_of(run)) == names | {wire.CONTROL + name for name in names}
    plain = run_of(job.model_copy(update={"server": job.server.model_copy(update={"strategy": "FedAvg"})}), "plain")
    assert summarise(run).bytes_up == 2 * summarise(plain).bytes_up


def test_only_parameters_that_train_and_travel_have_a_control_variate(scaffold_job, run_of):
    run = run_of(scaffold_job(task__freeze=["0.bias"]))
    controls = {name for name in arrays_of(run) if name.startswith(wire.CONTROL)}
    assert controls == {"scaffold/0.weight", "scaffold/2.weight", "scaffold/2.bias"}


def test_update_norm_is_that_of_the_change_of_model_and_control_variates(scaffold_job, run_of):
    """Clients send Δc, not a new c: its distance from c would say nothing."""
    job = scaffold_job(job__rounds=4, local__lr=1e-6, cohort__fraction=1.0)
    events = [e for e in read_events(run_of(job).events_file) if isinstance(e, ClientTrained)]
    control = max(e.update_norm for e in events if e.round == 1)
    # With a tiny rate the model hardly moves, so from round 2 on Δc is only the noise of shuffling.
    assert max(e.update_norm for e in events if e.round > 1) < 0.2 * control


# --- killed and resumed -------------------------------------------------------------------------


def stop_at(kind, number, skip=0):
    """Ctrl-C at the given event of the given round."""
    seen = []

    def listen(event):
        if isinstance(event, kind) and event.round == number:
            seen.append(event)
            if len(seen) > skip:
                raise KeyboardInterrupt

    return listen


@pytest.mark.parametrize(("kind", "skip"), [(RoundStarted, 0), (ClientTrained, 1), (RoundFinished, 0)])
@pytest.mark.parametrize("every", [1, 3])
def test_killed_and_resumed_equals_never_stopped(kind, skip, every, scaffold_job, run_of, tmp_path):
    job = scaffold_job(job__rounds=7, server__checkpoint_every=every)
    whole = run_of(job, "whole")
    broken = RunDirectory.create(tmp_path / "broken", job)
    with pytest.raises(KeyboardInterrupt):
        start_run(job, grid_of(job), broken, (stop_at(kind, 5, skip),))
    resume_run(grid_of(job), RunDirectory(broken.path))
    assert broken.model_file.read_bytes() == whole.model_file.read_bytes()
    for name in ("model.safetensors", "clients.safetensors"):
        left, right = (run.checkpoints / "round-000007" / name for run in (broken, whole))
        assert safetensors_equal(left, right), name


def safetensors_equal(left, right):
    one, other = safetensors.numpy.load_file(left), safetensors.numpy.load_file(right)
    one.pop("layouts", None), other.pop("layouts", None)
    return one.keys() == other.keys() and all(one[name].tobytes() == other[name].tobytes() for name in one)


class Elsewhere(CohortGrid):
    """A Grid whose clients are elsewhere: what they remember can't be restored from here."""

    def __init__(self, grid):
        super().__init__(grid, grid.get_node_ids())


def test_resume_on_a_grid_that_cant_restore_client_state_is_refused(scaffold_job, tmp_path):
    job = scaffold_job(job__rounds=4)
    broken = RunDirectory.create(tmp_path / "broken", job)
    with pytest.raises(KeyboardInterrupt):
        start_run(job, grid_of(job), broken, (stop_at(RoundStarted, 3),))
    grid = Elsewhere(grid_of(job))
    with pytest.raises(UsageError, match="can't restore"):
        resume_run(grid, RunDirectory(broken.path))


# --- the strategy alone -------------------------------------------------------------------------


def reply(arrays, examples=1, updates=None, node=2):
    become_server(1)
    request = Message(RecordDict(), dst_node_id=node, message_type="train")
    content = wire.reply_content(wire.Identity("j", 1, 1), examples, {}, wire.encode_arrays(arrays))
    if updates is not None:
        content[wire.METRICS][wire.NUM_UPDATES] = updates
    return Message(content, reply_to=request)


def sent(strategy, arrays):
    strategy._sent = arrays
    return strategy


ARRAYS = {
    "w": np.array([1.0, 2.0], np.float32),
    "count": np.array(4, np.int64),
    "scaffold/w": np.array([0.5, 0.0], np.float32),
}


def test_a_mean_over_three_updates_equals_three_replies():
    replies = [
        reply({"w": ARRAYS["w"] + i, "count": np.array(4), "scaffold/w": np.array([i, 1.0], np.float32)}, 5, node=i + 2)
        for i in range(3)
    ]
    mean = reply(
        {"w": ARRAYS["w"] + 1, "count": np.array(4), "scaffold/w": np.array([1.0, 1.0], np.float32)}, 15, updates=3
    )
    one, other = (sent(Scaffold(6, 2.0), ARRAYS).aggregate_train(1, given)[0] for given in (replies, [mean]))
    assert np.allclose(one["w"].numpy(), other["w"].numpy())
    assert np.array_equal(other["w"].numpy(), [3.0, 4.0])  # global_lr = 2: twice the step
    assert np.array_equal(other["scaffold/w"].numpy(), [1.0, 0.5])  # 3 of 6 clients: half of mean Δc
    assert np.allclose(one["scaffold/w"].numpy(), other["scaffold/w"].numpy())


def test_buffers_take_the_mean_whatever_the_global_rate():
    given = reply(ARRAYS | {"count": np.array(8)}, updates=1)
    arrays, _ = sent(Scaffold(1, 3.0), ARRAYS).aggregate_train(1, [given])
    assert arrays["count"].numpy() == 8


def test_no_reply_changes_nothing():
    assert sent(Scaffold(3), ARRAYS).aggregate_train(1, [])[0] is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"local__optimizer": "adam"}, "Scaffold' needs local.optimizer = 'sgd'"),
        ({"local__momentum": 0.9}, "local.momentum = 0"),
        ({"server__args": {"global_lr": 0}}, "global_lr must be > 0"),
        ({"server__args": {"global_lr": "big"}}, "server.args.global_lr must be float"),
        ({"server__args": {"global_lrr": 1.0}}, "did you mean 'global_lr'"),
        ({"server__args": {"num_clients": 3}}, "num_clients is fedplat's to set"),
    ],
)
def test_what_scaffold_cant_do_is_named_before_anything_starts(settings, message, scaffold_job):
    with pytest.raises(UsageError, match=message):
        build_strategy(scaffold_job(**settings))


def test_a_schedule_that_ends_at_zero_ends_well(scaffold_job, run_of):
    run = run_of(scaffold_job(local__schedule={"kind": "linear", "floor": 0.0}, job__rounds=4))
    assert summarise(run).status == "finished"
    assert all(np.isfinite(array).all() for array in arrays_of(run).values())
