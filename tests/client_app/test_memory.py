"""What a client keeps: the same request gets the same reply, however often it comes."""

from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, RecordDict
from torch import nn

from client_app.handler import Handler
from client_app.local import LocalTrainer
from client_app.memory import keep, latest, recall
from fedplat import wire
from fedplat.errors import UsageError
from fedplat.job import Job, validate_job
from fedplat.records import decode_records, encode_records
from fedplat.tasks import load_task
from fedplat.wire import Identity
from server_app.evaluation import GlobalModel


def arrays(value: float) -> dict[str, np.ndarray]:
    return {"head": np.full(3, value, np.float32), "count": np.array(value, np.int64)}


def value_of(found: dict[str, np.ndarray]) -> float:
    return float(found["head"][0])


def test_a_fresh_client_remembers_nothing() -> None:
    assert recall(RecordDict(), 1) == latest(RecordDict()) == {}


def test_the_next_round_starts_from_what_was_kept() -> None:
    memory = RecordDict()
    keep(memory, 2, arrays(1))
    assert value_of(recall(memory, 3)) == value_of(recall(memory, 9)) == value_of(latest(memory)) == 1


def test_the_same_round_again_starts_where_it_started_before() -> None:
    memory = RecordDict()
    keep(memory, 2, arrays(1))
    for _ in range(3):
        keep(memory, 5, arrays(2))
        assert value_of(recall(memory, 5)) == 1
        assert value_of(recall(memory, 6)) == value_of(latest(memory)) == 2


def test_a_first_round_repeated_starts_from_nothing() -> None:
    memory = RecordDict()
    keep(memory, 4, arrays(1))
    assert recall(memory, 4) == {}


def test_a_server_that_was_set_back_is_told() -> None:
    memory = RecordDict()
    keep(memory, 4, arrays(1))
    for forbidden in (lambda: recall(memory, 3), lambda: keep(memory, 3, arrays(2))):
        with pytest.raises(UsageError, match=r"asked for round 3, but this client's state is that of round 4"):
            forbidden()
    assert value_of(latest(memory)) == 1


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_not_kept(bad: float) -> None:
    memory = RecordDict()
    keep(memory, 1, arrays(1))
    keep(memory, 2, {"head": np.array([1, bad, 1], np.float32), "count": np.array(1)})
    assert value_of(latest(memory)) == 1
    assert value_of(recall(memory, 2)) == 1


def test_memory_survives_a_checkpoint_and_leaves_other_records_alone() -> None:
    memory = RecordDict({"theirs": ConfigRecord({"x": 1})})
    keep(memory, 1, arrays(1))
    keep(memory, 2, arrays(2))
    again = decode_records(*encode_records(memory))
    assert again == memory
    assert value_of(recall(again, 2)) == 1
    assert recall(again, 2)["count"].shape == ()


# --- through the handler ------------------------------------------------------------------------

PERSONAL: dict[str, Any] = {
    "task": {"name": "cancer", "args": {"hidden": 4}, "personal": ["2.*"]},
    "evaluation": {"server": False, "clients": 1.0},
}
SCAFFOLD: dict[str, Any] = {"task": {"name": "cancer", "args": {"hidden": 4}}, "server": {"strategy": "Scaffold"}}


def job_of(**sections: Any) -> Job:
    table = {
        "data": {"holdout": 0.25, "partition": {"kind": "iid"}},
        "cohort": {"clients": 4, "fraction": 1.0},
        "local": {"batch_size": 16, "lr": 0.1},
    }
    return validate_job(table | sections, "test")


def request(job: Job, number: int = 1, shift: float = 0.0) -> RecordDict:
    initial = GlobalModel(job, load_task(job)).initial
    content = RecordDict({wire.CONFIG: Identity(job.digest, number, 1).record()})
    content[wire.ARRAYS] = wire.encode_arrays({name: array + np.float32(shift) for name, array in initial.items()})
    return content


def bits(reply: RecordDict) -> dict[str, bytes]:
    return {name: array.data for name, array in reply.array_records[wire.ARRAYS].items()}


def who(job: Job, number: int, attempt: int = 1, client: str = "client-1") -> Identity:
    return Identity(job.digest, number, attempt, client)


@pytest.mark.parametrize("sections", [PERSONAL, SCAFFOLD], ids=["personal", "scaffold"])
def test_another_attempt_repeats_the_update_and_what_is_kept(sections: dict[str, Any]) -> None:
    job = job_of(**sections)
    handler, memory = Handler(job), RecordDict()
    handler.train(request(job, 1), who(job, 1), memory)
    first = handler.train(request(job, 2, 0.01), who(job, 2), memory)
    after = latest(memory)
    handler.train(request(job, 2, 0.01), who(job, 2, client="client-3"), RecordDict())
    again = handler.train(request(job, 2, 0.01), who(job, 2, attempt=2), memory)
    assert bits(first) == bits(again)
    assert all(np.array_equal(after[name], array) for name, array in latest(memory).items())


@pytest.mark.parametrize("sections", [PERSONAL, SCAFFOLD], ids=["personal", "scaffold"])
def test_what_is_kept_decides_the_next_update(sections: dict[str, Any]) -> None:
    job = job_of(**sections)
    handler, memory = Handler(job), RecordDict()
    fresh = handler.train(request(job, 2, 0.01), who(job, 2), RecordDict())
    handler.train(request(job, 1), who(job, 1), memory)
    assert bits(handler.train(request(job, 2, 0.01), who(job, 2), memory)) != bits(fresh)


@pytest.mark.parametrize("sections", [PERSONAL, SCAFFOLD], ids=["personal", "scaffold"])
def test_a_stateful_job_without_memory_is_refused(sections: dict[str, Any]) -> None:
    job = job_of(**sections)
    with pytest.raises(UsageError, match=r"give their Context\.state"):
        Handler(job).train(request(job), who(job, 1))


def test_a_job_without_state_writes_none() -> None:
    job = job_of()
    memory = RecordDict()
    Handler(job).train(request(job), who(job, 1), memory)
    assert not memory


def test_evaluation_uses_the_clients_own_layers_and_changes_nothing() -> None:
    job = job_of(**PERSONAL)
    handler, memory, other = Handler(job), RecordDict(), RecordDict()
    for number in (1, 2, 3):
        handler.train(request(job, number), who(job, number), memory)
    before = encode_records(memory)[0]
    handler.train(request(job, 1), who(job, 1, client="client-2"), other)

    def loss(kept: RecordDict) -> float:
        return float(handler.evaluate(request(job, 3), who(job, 3), kept).metric_records[wire.METRICS]["loss"])

    own = loss(memory)
    assert own != loss(other) != loss(RecordDict()) != own
    assert loss(memory) == own
    assert encode_records(memory)[0] == before


def test_control_variates_that_do_not_fit_are_refused_and_nothing_is_kept() -> None:
    job = job_of(**SCAFFOLD)
    handler, memory = Handler(job), RecordDict()
    for change in ({"scaffold/0.bias": np.zeros(1, np.float32)}, {"scaffold/0.bias": np.zeros((1, 4), np.float32)}):
        bad = request(job)
        bad[wire.ARRAYS] = wire.encode_arrays(wire.decode_arrays(bad.array_records[wire.ARRAYS]) | change)
        with pytest.raises(ValueError, match=r"scaffold/0\.bias"):
            handler.train(bad, who(job, 1), memory)
    missing = request(job)
    record = wire.decode_arrays(missing.array_records[wire.ARRAYS])
    missing[wire.ARRAYS] = wire.encode_arrays({n: a for n, a in record.items() if n != "scaffold/0.bias"})
    with pytest.raises(ValueError, match=r"scaffold/0\.bias"):
        handler.train(missing, who(job, 1), memory)
    assert not memory


# --- corrections in the training loop -----------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_corrections_come_after_the_clip_and_before_the_step(precision: str) -> None:
    job = validate_job({"local": {"lr": 0.5, "batch_size": 64, "clip_norm": 1e-3, "precision": precision}}, "test")
    task = load_task(job)
    examples = task.data("train")[slice(0, 64)]
    model = task.model()
    start = [p.detach().clone() for p in model.parameters()]
    corrections = [(p, torch.full_like(p, 0.1)) for p in model.parameters()]
    trainer = LocalTrainer(job, task, model, torch.device("cpu"))
    trainer.train(examples, 0.5, torch.Generator().manual_seed(1), corrections)
    for before, parameter in zip(start, model.parameters(), strict=True):
        assert torch.allclose(before - parameter.detach(), torch.full_like(before, 0.05), atol=6e-4)


def test_a_parameter_without_gradient_is_corrected_too() -> None:
    """Else its control variate would run away: cᵢ⁺ = cᵢ − c in every round."""
    job = validate_job({"local": {"lr": 0.5, "batch_size": 64}}, "test")
    task = load_task(job)
    model = task.model()
    model.unused = nn.Parameter(torch.zeros(2))
    trainer = LocalTrainer(job, task, model, torch.device("cpu"))
    trainer.train(task.data("train")[slice(0, 64)], 0.5, torch.Generator(), [(model.unused, torch.ones(2))])
    assert torch.equal(model.unused.detach(), torch.full((2,), -0.5))
