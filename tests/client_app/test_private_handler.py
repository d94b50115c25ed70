"""A private client's reply says what its plan pays for, and nothing else; nor does its silence."""

import logging
import math

import numpy as np
import pytest
import torch
from flwr.app import Context, Message, RecordDict
from torch import Tensor, nn

from client_app.app import app
from client_app.handler import Handler, handle_evaluate, handle_train, handler_for
from fedplat import wire
from fedplat.errors import JobError, UsageError
from fedplat.flower import become_server, new_context, stamp
from fedplat.job import Job
from fedplat.model import read_arrays
from fedplat.tasks.digits import Digits
from fedplat.wire import Identity
from simulations.engine import Delivery, run_client

SECRET = "patient 4711 has gout"


@pytest.fixture
def private_job(tiny_job):
    def make(**settings: object) -> Job:
        privacy = {"unit": "sample", "noise_multiplier": 1.0, "sample_rate": 0.2}
        return tiny_job(**({f"privacy__{key}": value for key, value in privacy.items()} | settings))

    return make


def request(job: Job, number: int = 1, **arrays: np.ndarray) -> RecordDict:
    content = RecordDict({wire.CONFIG: Identity(job.digest, number, 0).record()})
    content[wire.ARRAYS] = wire.encode_arrays(read_arrays(handler_for(job.canonical()).state) | arrays)
    return content


def virtual(job: Job, client: int = 0) -> Context:
    """A virtual client: its spends are in the simulation's ledger."""
    node = {"partition-id": client, wire.SIMULATED: True}
    return new_context(7, 100 + client, node, {wire.JOB_KEY: job.canonical()})


def message(content: RecordDict, kind: str = "train") -> Message:
    become_server(7)
    asked = Message(content, dst_node_id=100, message_type=kind)
    stamp(asked)
    return asked


def train(job: Job, client: int = 0, **arrays: np.ndarray) -> RecordDict:
    return handle_train(message(request(job, **arrays)), virtual(job, client)).content


def test_a_private_reply_has_no_loss_no_size_and_no_time(private_job):
    job = private_job()
    sizes = {len(handler_for(job.canonical()).data.rows(f"client-{i}").train) for i in range(6)}
    assert len(sizes) > 1
    metrics = [dict(train(job, client).metric_records[wire.METRICS]) for client in range(6)]
    assert metrics == [{wire.NUM_EXAMPLES: 1, "steps": 5.0, "lr": 0.2}] * 6


def test_the_same_request_again_is_another_release(private_job):
    job = private_job()
    one, other = (wire.decode_arrays(train(job)[wire.ARRAYS]) for _ in range(2))
    assert all(not np.array_equal(one[name], other[name]) for name in one)


def test_under_insecure_noise_the_same_request_again_is_the_same_release(private_job):
    job = private_job(privacy__insecure_noise=True)
    content = request(job)
    replies = [handle_train(message(content), virtual(job)).content for _ in range(2)]
    replies.append(Handler(job).train(content, Identity(job.digest, 1, 0, "client-0")))
    one, *others = [{n: a.data for n, a in reply[wire.ARRAYS].items()} for reply in replies]
    assert others == [one, one]


class Telling(Digits):
    """Fails on its data, and says why."""

    error: type[Exception] = ValueError
    armed = False

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if type(self).armed:
            raise type(self).error(SECRET)
        return super().loss(outputs, targets)


@pytest.mark.parametrize("error", [ValueError, RuntimeError, UsageError, JobError, KeyError])
def test_the_error_of_a_private_client_is_told_to_its_own_log_only(error, private_job, monkeypatch, caplog):
    job = private_job(task__name=f"{__name__}:Telling")
    content = request(job)
    monkeypatch.setattr(Telling, "error", error)
    monkeypatch.setattr(Telling, "armed", True)
    with caplog.at_level(logging.ERROR):
        done = run_client(app, Delivery(message(content), virtual(job)))
    assert done.reply.has_error()
    assert SECRET not in done.reply.error.reason
    assert "private training failed at this site" in done.reply.error.reason
    assert error is JobError or error.__name__ not in done.reply.error.reason
    assert SECRET in caplog.text
    monkeypatch.setattr(Telling, "armed", False)
    assert not run_client(app, Delivery(message(content), virtual(job))).reply.has_error()


def test_without_privacy_the_error_is_told(tiny_job, monkeypatch):
    job = tiny_job(task__name=f"{__name__}:Telling")
    content = request(job)
    monkeypatch.setattr(Telling, "armed", True)
    assert SECRET in run_client(app, Delivery(message(content), virtual(job))).reply.error.reason


class Remembering(Digits):
    """A buffer that only moves with larger batches: no rehearsal finds it."""

    def model(self) -> nn.Module:
        class Late(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.line = nn.Linear(64, 10)
                self.register_buffer("seen", torch.zeros(64))

            def forward(self, x: Tensor) -> Tensor:
                if len(x) > 8:
                    self.seen.copy_(x.mean(0))
                return self.line(x)

        return Late()


def test_a_buffer_that_moves_after_all_never_leaves(private_job):
    job = private_job(task__name=f"{__name__}:Remembering", task__args={})
    with pytest.raises(JobError, match="private training failed"):
        train(job)


def test_an_adaptive_clip_norm_travels_both_ways_and_nonsense_is_refused(private_job):
    job = private_job(privacy__adaptive={}, privacy__insecure_noise=True)
    reply = wire.decode_arrays(train(job, **{wire.CLIP_NORM: np.array(0.5, np.float32)})[wire.ARRAYS])
    assert 0.05 < float(reply[wire.CLIP_NORM]) < 5 and float(reply[wire.CLIP_NORM]) != 0.5
    for nonsense in (math.nan, math.inf, -1.0, 0.0, 1e30):
        with pytest.raises(JobError):
            train(job, **{wire.CLIP_NORM: np.array(nonsense, np.float32)})
    with pytest.raises(JobError):
        train(job)


@pytest.mark.parametrize("holdout", [0.3, 0.0005])
def test_a_private_evaluation_releases_noisy_means_and_hides_how_many(holdout, private_job):
    """Also of a client that holds nothing out: that it has nothing is not told either."""
    job = private_job(privacy__evaluation_noise=2.0, evaluation__clients=0.5, data__holdout=holdout)
    handler = handler_for(job.canonical())
    replies = [handle_evaluate(message(request(job), "evaluate"), virtual(job)).content for _ in range(2)]
    metrics = [dict(reply.metric_records[wire.METRICS]) for reply in replies]
    assert all(found[wire.NUM_EXAMPLES] == 1 and found.keys() == metrics[0].keys() for found in metrics)
    assert metrics[0]["accuracy"] != metrics[1]["accuracy"] or len(handler.data.rows("client-0").holdout) == 0
    assert all(0 <= found["accuracy"] <= 1 for found in metrics)


def test_a_model_that_can_not_be_private_is_refused_before_any_request(private_job):
    job = private_job(task__name=f"{__name__}:Coupled", task__args={})
    with pytest.raises(UsageError, match=r"layer '0' \(BatchNorm1d\)"):
        handler_for(job.canonical())


class Coupled(Digits):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(64), nn.Linear(64, 10))


def test_calibration_of_engines_releases_nothing_and_leaves_the_model_to_the_request(private_job):
    """`handler.fit` is timed on real data before a run; the next reply must start from what it was sent."""
    job = private_job(privacy__insecure_noise=True)
    handler, content = Handler(job), request(job)
    identity = Identity(job.digest, 1, 0, "client-2")
    expected = wire.decode_arrays(handler.train(content, identity)[wire.ARRAYS])
    handler.fit(handler.data.train("client-1"), 0.2, Identity(job.digest, 0, 0, "client-1"))
    found = wire.decode_arrays(handler.train(content, identity)[wire.ARRAYS])
    assert all(np.array_equal(found[name], expected[name]) for name in expected)
