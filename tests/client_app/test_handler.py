"""The request handler: identity and arrays decide the reply, and nothing else that a request says."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict

from client_app.app import app
from client_app.handler import Handler, handle_evaluate, handle_hello, handle_train, handler_for, name_of
from fedplat import wire
from fedplat.errors import UsageError
from fedplat.evaluate import evaluate
from fedplat.flower import become_server, new_context, stamp
from fedplat.job import Job, validate_job
from fedplat.model import build_model, read_arrays, travelling_state, write_arrays
from fedplat.tasks import load_task
from fedplat.wire import Identity


def job_of(**sections: Any) -> Job:
    table = {
        "job": {"name": "t", "rounds": 5},
        "task": {"name": "cancer", "args": {"hidden": 4}},
        "data": {"holdout": 0.25, "partition": {"kind": "iid"}},
        "cohort": {"clients": 6, "fraction": 1.0},
        "local": {"batch_size": 8, "lr": 0.1},
    }
    return validate_job({key: value | sections.get(key, {}) for key, value in table.items()}, "test")


JOB = job_of()


def initial(job: Job = JOB) -> dict[str, np.ndarray]:
    return read_arrays(travelling_state(build_model(job, load_task(job)), job.task.freeze))


def request(
    job: Job = JOB, number: int = 1, attempt: int = 0, arrays: dict[str, np.ndarray] | None = None
) -> RecordDict:
    content = RecordDict({wire.CONFIG: Identity(job.digest, number, attempt).record()})
    content[wire.ARRAYS] = wire.encode_arrays(initial(job) if arrays is None else arrays)
    return content


def context_of(job: Job, client: int = 0, **node: Any) -> Context:
    return new_context(7, 100 + client, node or {"partition-id": client}, {wire.JOB_KEY: job.canonical()})


def message_of(content: RecordDict, kind: str = "train") -> Message:
    become_server(7)
    message = Message(content, dst_node_id=100, message_type=kind)
    stamp(message)
    return message


def ask(content: RecordDict, job: Job = JOB, client: int = 0) -> RecordDict:
    return handle_train(message_of(content), context_of(job, client)).content


def arrays_of(reply: RecordDict) -> dict[str, np.ndarray]:
    return wire.decode_arrays(reply.array_records[wire.ARRAYS])


def bits(reply: RecordDict) -> tuple[Any, ...]:
    """All of a reply except how long it took."""
    metrics = {k: v for k, v in reply.metric_records[wire.METRICS].items() if k != "seconds"}
    arrays = {name: array.data for name, array in reply.array_records[wire.ARRAYS].items()}
    return metrics, arrays, dict(reply.config_records[wire.IDENTITY])


def same(one: RecordDict, other: RecordDict) -> bool:
    left, right = arrays_of(one), arrays_of(other)
    return left.keys() == right.keys() and all(np.array_equal(left[name], right[name]) for name in left)


def test_same_request_gets_the_same_reply_whatever_came_between() -> None:
    first = ask(request(), client=2)
    ask(request(number=4), client=3)
    handle_evaluate(message_of(request(), "evaluate"), context_of(JOB, 1))
    torch.rand(9)
    assert bits(ask(request(), client=2)) == bits(first)


def test_a_cold_handler_gives_the_reply_of_a_warm_one() -> None:
    warm = Handler(JOB)
    warm.train(request(), Identity(JOB.digest, 1, 0, "client-5"))
    identity = Identity(JOB.digest, 2, 0, "client-1")
    assert bits(warm.train(request(), identity)) == bits(Handler(JOB).train(request(), identity))


def test_other_client_or_round_gets_another_update() -> None:
    first = ask(request(), client=0)
    assert not same(first, ask(request(), client=1))
    assert not same(first, ask(request(number=2), client=0))


def test_another_attempt_repeats_the_update_and_says_so() -> None:
    first, again = ask(request()), ask(request(attempt=1))
    assert same(first, again)
    assert Identity.of(again, wire.IDENTITY) == Identity(JOB.digest, 1, 1, "client-0")


def test_reply_names_the_release_the_client_and_its_examples() -> None:
    reply = ask(request(number=3), client=4)
    handler = handler_for(JOB.canonical())
    assert Identity.of(reply, wire.IDENTITY) == Identity(JOB.digest, 3, 0, "client-4")
    metrics = reply.metric_records[wire.METRICS]
    assert metrics[wire.NUM_EXAMPLES] == len(handler.data.train("client-4"))
    assert metrics["lr"] == 0.1
    assert metrics["steps"] == -(-len(handler.data.train("client-4")) // 8)


def test_training_starts_from_the_arrays_of_the_request() -> None:
    zeros = {name: np.zeros_like(array) for name, array in initial().items()}
    tiny = job_of(local={"lr": 1e-30})
    reply = ask(request(tiny, arrays=zeros), tiny)
    assert all(np.abs(array).max() < 1e-20 for array in arrays_of(reply).values())


def test_request_is_not_changed_by_training() -> None:
    content = request()
    before = {name: bytes(a.data) for name, a in content.array_records[wire.ARRAYS].items()}
    ask(content)
    assert {name: bytes(a.data) for name, a in content.array_records[wire.ARRAYS].items()} == before


def test_hyper_parameters_in_a_request_are_not_obeyed() -> None:
    content = request()
    content.config_records[wire.CONFIG].update({"lr": 100.0, "epochs": 50, "client": "client-3"})
    assert bits(ask(content)) == bits(ask(request()))


def test_request_for_another_job_is_refused() -> None:
    other = job_of(job={"seed": 1})
    with pytest.raises(UsageError, match="request is for another job"):
        ask(request(other), JOB)
    with pytest.raises(UsageError, match="request is for another job"):
        handle_evaluate(message_of(request(other), "evaluate"), context_of(JOB))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda arrays: {}, "don't fit the model"),
        (lambda arrays: arrays | {"extra": np.zeros(1)}, "extra"),
        (lambda arrays: arrays | {"0.bias": np.zeros(99, np.float32)}, "0.bias"),
        (lambda arrays: {f"x.{name}": array for name, array in arrays.items()}, "don't fit the model"),
    ],
)
def test_arrays_that_do_not_fit_are_refused_and_the_next_request_is_served(change: Any, message: str) -> None:
    expected = bits(ask(request()))
    with pytest.raises(ValueError, match=message):
        ask(request(arrays=change(initial())))
    assert bits(ask(request())) == expected


def test_request_without_arrays_or_identity_is_refused() -> None:
    bare = RecordDict({wire.CONFIG: Identity(JOB.digest, 1, 0).record()})
    with pytest.raises(UsageError, match="no 'arrays' record"):
        ask(bare)
    with pytest.raises(ValueError, match="no 'config' record"):
        ask(RecordDict({}))


def test_the_same_bytes_under_other_names_are_another_model() -> None:
    """The handler remembers the last global model by its bytes; names belong to it too."""
    content = request()
    ask(content)
    renamed = RecordDict({wire.CONFIG: content[wire.CONFIG]})
    record = content.array_records[wire.ARRAYS]
    renamed[wire.ARRAYS] = type(record)({f"x.{name}": array for name, array in record.items()})
    with pytest.raises(ValueError, match="don't fit the model"):
        ask(renamed)


def test_unknown_client_is_refused() -> None:
    with pytest.raises(UsageError, match="unknown client 'client-6'"):
        ask(request(), client=6)


def test_node_is_called_by_its_name_else_by_its_partition() -> None:
    assert name_of(context_of(JOB, 3)) == "client-3"
    assert name_of(context_of(JOB, **{"name": "clinic", "partition-id": 3})) == "clinic"
    with pytest.raises(UsageError, match="this node has no name"):
        name_of(context_of(JOB, other=1))


def test_hello_tells_the_name() -> None:
    reply = handle_hello(message_of(RecordDict({"x": ConfigRecord({})}), "query.hello"), context_of(JOB, 2))
    assert reply.content.config_records[wire.IDENTITY]["client"] == "client-2"


def test_evaluation_measures_the_received_model_on_the_clients_held_out_examples() -> None:
    arrays = {name: array + 0.25 for name, array in initial().items()}
    reply = handle_evaluate(message_of(request(arrays=arrays), "evaluate"), context_of(JOB, 2)).content
    handler, task = handler_for(JOB.canonical()), load_task(JOB)
    model = build_model(JOB, task)
    write_arrays(model.state_dict(), arrays)
    expected = evaluate(model, task, handler.data.holdout("client-2"), torch.device("cpu"))
    metrics = dict(reply.metric_records[wire.METRICS])
    assert metrics.pop(wire.NUM_EXAMPLES) == expected.num_examples > 0
    assert metrics == pytest.approx(expected.metrics, rel=1e-6)
    assert not reply.array_records


def test_client_with_nothing_held_out_says_so() -> None:
    job = job_of(data={"holdout": 0.0})
    reply = handle_evaluate(message_of(request(job), "evaluate"), context_of(job))
    assert dict(reply.content.metric_records[wire.METRICS]) == {"num-examples": 0}


def test_per_client_rate_and_schedule_reach_the_update() -> None:
    job = job_of(local={"lr_by_client": {"client-1": 0.02}, "schedule": {"kind": "exponential", "gamma": 0.5}})
    rates = [
        ask(request(job, number=n), job, client).metric_records[wire.METRICS]["lr"] for client in (0, 1) for n in (1, 2)
    ]
    assert rates == [0.1, 0.05, 0.02, 0.01]


def test_frozen_parameters_do_not_travel() -> None:
    job = job_of(task={"freeze": ["0.*"]})
    reply = ask(request(job), job)
    assert set(arrays_of(reply)) == {"2.weight", "2.bias"}


NOISY = """
from torch import nn
from fedplat.tasks.cancer import Cancer

class Noisy(Cancer):
    def model(self):
        return nn.Sequential(nn.Linear(30, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 2))

    def augment(self, inputs, generator):
        return inputs + nn.init.normal_(inputs.new_empty(inputs.shape), generator=generator)
"""


@pytest.mark.parametrize("freeze", [[], ["0.*"], ["1.*"], ["1.running_*"]])
def test_reply_of_a_model_with_dropout_and_batch_norm_does_not_depend_on_earlier_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, freeze: list[str]
) -> None:
    (tmp_path / "noisy_task.py").write_text(NOISY)
    monkeypatch.syspath_prepend(tmp_path)
    task = {"name": "noisy_task:Noisy", "args": {}, "freeze": freeze}
    job = job_of(task=task, local={"batch_size": 10})  # BatchNorm can't train on a last batch of one example
    handler, identity = Handler(job), Identity(job.digest, 2, 0, "client-1")
    first = handler.train(request(job), identity)
    handler.train(request(job), Identity(job.digest, 2, 0, "client-4"))
    handler.evaluate(request(job), Identity(job.digest, 2, 0, "client-4"))
    torch.rand(3)
    assert bits(handler.train(request(job), identity)) == bits(first)
    held_out = [handler.evaluate(request(job), identity).metric_records[wire.METRICS] for _ in range(2)]
    fresh = Handler(job).evaluate(request(job), identity).metric_records[wire.METRICS]
    assert dict(held_out[0]) == dict(held_out[1]) == dict(fresh)


def test_flower_client_app_gives_the_handlers_reply() -> None:
    direct = ask(request(), client=1)
    through_app = app(message_of(request()), context_of(JOB, 1))
    assert bits(through_app.content) == bits(direct)
