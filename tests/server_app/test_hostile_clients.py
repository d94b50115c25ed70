"""Whatever one client sends costs it its place in the round, never the run. Each case once ended a whole run."""

import io
import zipfile

import numpy as np
import pytest
from flwr.app import Array, Context, Message
from flwr.serverapp.strategy import FedAvg
from torch import nn

from fedplat import wire
from fedplat.errors import JobError, UsageError
from fedplat.events import ClientFailed, RoundFinished, RoundStarted, RunStarted, read_events
from fedplat.rundir import RunDirectory
from fedplat.summary import summarise
from fedplat.tasks.digits import Digits
from server_app.cohort import CohortGrid
from server_app.exchange import Exchange
from server_app.strategies import build_strategy, strategy_names
from simulations.local_grid import LocalGrid
from simulations.simulate import resume
from tests.server_app.test_driver import client_app, events_of, only, run_with
from tests.server_app.test_resume import stopped
from tests.server_app.test_strategies import ARGUMENTS


def npy_claiming(shape: tuple[int, ...]) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": shape})
    return file.getvalue()


def zipped() -> bytes:
    file = io.BytesIO()
    np.savez(file, np.zeros(3))
    return file.getvalue()


def bomb() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.npy", bytes(10_000_000))
    return file.getvalue()


def with_bytes(data: bytes):
    def behave(message: Message, context: Context, reply: Message) -> Message:
        arrays = reply.content[wire.ARRAYS]
        name = next(iter(arrays))
        arrays[name] = Array(arrays[name].dtype, tuple(arrays[name].shape), "numpy.ndarray", data)
        return reply

    return behave


def with_metric(name: str, value: object):
    def behave(message: Message, context: Context, reply: Message) -> Message:
        dict.__setitem__(reply.content[wire.METRICS].__dict__["_data"], name, value)
        return reply

    return behave


def with_long_name(message: Message, context: Context, reply: Message) -> Message:
    reply.content[wire.IDENTITY]["client"] = "x" * 5_000_000
    return reply


HOSTILE = {
    "npz archive": with_bytes(zipped()),
    "zip bomb": with_bytes(bomb()),
    "broken zip": with_bytes(b"PK\x03\x04junk"),
    "a petabyte by its own header": with_bytes(npy_claiming((10**15,))),
    "pickled objects": with_bytes(np.array([{}], dtype=object).dumps()),
    "empty bytes": with_bytes(b""),
    "far too many bytes": with_bytes(bytes(1_000_000)),
    "a metric of its own": with_metric("zzz", 1.0),
    "a metric beyond floats": with_metric("loss", 10**400),
    "an overflowing metric": with_metric("loss", 1.7e308),
    "all examples of the world": with_metric("num-examples", 2**31 - 1),
    "a giant name": with_long_name,
}


@pytest.mark.parametrize("strategy", ["FedAvg", "FedMedian", "Krum"])
@pytest.mark.parametrize("behaviour", HOSTILE.values(), ids=HOSTILE.keys())
def test_one_hostile_client_never_ends_the_run(behaviour, strategy, tiny_job, tmp_path):
    job = tiny_job(cohort__fraction=1.0, job__rounds=1, server__strategy=strategy)
    run = run_with(job, tmp_path, client_app(only(0, behaviour)))
    assert events_of(run, RoundFinished)[0].accepted >= 5
    assert all(len(failure.reason) <= 300 for failure in events_of(run, ClientFailed))


def test_a_claim_of_many_examples_does_not_push_the_others_out(tiny_job, tmp_path):
    job = tiny_job(cohort__fraction=1.0, job__rounds=1)
    run = run_with(job, tmp_path, client_app(only(0, with_metric("num-examples", 2**31 - 1))))
    assert [(f.client, f.kind) for f in events_of(run, ClientFailed)] == [("client-0", "refused")]


def in_fortran_order(message: Message, context: Context, reply: Message) -> Message:
    arrays = reply.content[wire.ARRAYS]
    for name in list(arrays):
        arrays[name] = Array(np.asfortranarray(arrays[name].numpy()))
    return reply


@pytest.mark.parametrize("strategy", ["FedAvg", "FedMedian", "Krum"])
def test_the_memory_order_of_an_update_is_nobodys_business(strategy, tiny_job, tmp_path):
    """A checkpoint of an array in Fortran order would come back scrambled."""
    job = tiny_job(
        cohort__fraction=1.0, job__rounds=2, server__strategy=strategy, server__args=ARGUMENTS.get(strategy, {})
    )
    for name in ("plain", "fortran"):
        (tmp_path / name).mkdir()
    plain = run_with(job, tmp_path / "plain", client_app())
    fortran = run_with(job, tmp_path / "fortran", client_app(in_fortran_order))
    written = [
        {path.name: path.read_bytes() for path in sorted(run.checkpoints.rglob("model.safetensors"))}
        for run in (plain, fortran)
    ]
    assert written[0] and written[0] == written[1]


# --- strategies and models that used to break a run ------------------------------------------------


class Normalised(Digits):
    """BatchNorm: float statistics and an integer counter of no dimension."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 10))


@pytest.mark.parametrize("strategy", [name for name in strategy_names() if name != "QFedAvg"])
def test_batch_norm_trains_and_resumes_with_every_strategy(strategy, tiny_job, simulated, tmp_path):
    job = tiny_job(
        task__name=f"{__name__}:Normalised", task__args={}, local__batch_size=200, server__strategy=strategy,
        server__args=ARGUMENTS.get(strategy, {}), data__partition={"kind": "iid"},
    )  # fmt: skip
    whole = simulated(job, "whole")
    broken = stopped(job, tmp_path / "broken", RoundStarted, 3)
    resume(RunDirectory(broken.path))
    assert broken.model_file.read_bytes() == whole.model_file.read_bytes()


def test_a_strategy_that_cannot_do_integers_says_so_before_the_run(tiny_job, simulated):
    job = tiny_job(task__name=f"{__name__}:Normalised", task__args={}, server__strategy="QFedAvg")
    with pytest.raises(UsageError, match=r"QFedAvg can't aggregate '1.num_batches_tracked' \(int64\)"):
        simulated(job)


class Mine(FedAvg):
    """Somebody's own strategy, with Flower's defaults: it waits for two nodes."""


class Patient(FedAvg):
    """A strategy that insists on more nodes than there are."""

    def __init__(self) -> None:
        super().__init__(min_available_nodes=50)


def test_a_strategy_of_ones_own_does_not_wait_for_nodes(tiny_job, simulated):
    run = simulated(tiny_job(server__strategy=f"{__name__}:Mine", cohort__size=1))
    assert summarise(run).updates == 3


def test_a_strategy_that_polls_for_more_nodes_is_stopped(tiny_job, simulated, monkeypatch):
    monkeypatch.setattr("flwr.serverapp.strategy.strategy_utils.sleep", lambda seconds: None)
    with pytest.raises(JobError, match="waits for more nodes"):
        simulated(tiny_job(server__strategy=f"{__name__}:Patient"))


class Idle(FedAvg):
    def aggregate_train(self, server_round, replies):
        return None, None


def test_a_round_that_the_strategy_did_not_aggregate_is_not_a_success(tiny_job, simulated):
    with pytest.raises(JobError, match="did not aggregate 4 accepted updates"):
        simulated(tiny_job(server__strategy=f"{__name__}:Idle"))


@pytest.mark.parametrize(
    ("strategy", "args", "message"),
    [
        ("Bulyan", {"num_malicious_nodes": 1}, "Bulyan needs .* = 7 clients per round, the cohort has 4"),
        ("Krum", {"num_malicious_nodes": -3}, "must be ≥ 0"),
        ("FedProx", {"proximal_mu": -1.0}, "must be ≥ 0"),
    ],
)
def test_arguments_that_would_fail_silently_are_refused(strategy, args, message, tiny_job):
    with pytest.raises(UsageError, match=message):
        build_strategy(tiny_job(server__strategy=strategy, server__args=args))


# --- the log and the network ----------------------------------------------------------------------


def test_a_resume_before_the_first_commit_counts_nothing_twice(tiny_job, simulated, tmp_path):
    job = tiny_job(job__rounds=4, server__checkpoint_every=4)
    whole = simulated(job, "whole")
    broken = stopped(job, tmp_path / "broken", RoundStarted, 3)
    resume(RunDirectory(broken.path))
    events = read_events(broken.events_file)
    assert sum(isinstance(event, RunStarted) for event in events) == 1
    for total in ("updates", "rounds", "bytes_up", "model_sha256"):
        assert getattr(summarise(broken), total) == getattr(summarise(whole), total)


class LossyGrid(LocalGrid):
    """Like Flower's own, gives no id to a message that it could not push."""

    def push_messages(self, messages):
        ids = list(super().push_messages(messages))
        return [None, *ids[1:]] if len(ids) > 1 else ids


def test_a_message_that_could_not_be_sent_is_a_named_failure(tiny_job, tmp_path):
    run = run_with(tiny_job(job__rounds=1), tmp_path, client_app(), LossyGrid)
    assert [f.reason for f in events_of(run, ClientFailed)] == ["the message could not be sent"]
    assert events_of(run, RoundFinished)[0].failed == 1


class RefusingGrid(LocalGrid):
    def push_messages(self, messages):
        return []


def test_messages_that_are_all_refused_stop_the_run_with_a_reason(tiny_job, tmp_path):
    with pytest.raises(JobError, match="took 0 of 4 messages"):
        run_with(tiny_job(job__rounds=1), tmp_path, client_app(), RefusingGrid)


def test_an_exchange_outside_its_cohort_is_refused(tiny_job):
    grid = LocalGrid(client_app(), 3, {})
    request = Message(wire.RecordDict(), dst_node_id=1002, message_type="train")
    with pytest.raises(JobError, match="not in the cohort"):
        CohortGrid(grid, [1000, 1001]).push_messages([request])
    assert Exchange(grid, 1.0).missing() == []
