"""The round driver against clients that fail, lie, are late, or send twice."""

import time
from collections.abc import Callable

import numpy as np
import pytest
import safetensors.numpy
from flwr.app import Array, Context, Message
from flwr.clientapp import ClientApp

from client_app.handler import handle_evaluate, handle_train
from fedplat import wire
from fedplat.errors import JobError
from fedplat.events import ClientFailed, ClientTrained, Evaluated, RoundFinished, RoundStarted, RunFailed, read_events
from fedplat.model import build_model
from fedplat.rundir import RunDirectory
from fedplat.tasks import load_task
from fedplat.wire import JOB_KEY
from server_app.cohort import sample_cohort
from server_app.run import start_run
from simulations.local_grid import LocalGrid

Behaviour = Callable[[Message, Context, Message], Message]


def client_app(*behaviours: Behaviour) -> ClientApp:
    """The real client, whose reply then passes through the given behaviours."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        reply = handle_train(message, context)
        for behave in behaviours:
            reply = behave(message, context, reply)
        return reply

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        return handle_evaluate(message, context)

    return app


def only(partition: int, behave: Behaviour, rounds: tuple[int, ...] = (1, 2, 3)) -> Behaviour:
    """Let one client misbehave, the others not."""

    def limited(message: Message, context: Context, reply: Message) -> Message:
        number = message.content[wire.CONFIG]["round"]
        return (
            behave(message, context, reply)
            if context.node_config["partition-id"] == partition and number in rounds
            else reply
        )

    return limited


def crash(message: Message, context: Context, reply: Message) -> Message:
    raise RuntimeError("the disk caught fire")


def send_nan(message: Message, context: Context, reply: Message) -> Message:
    arrays = reply.content[wire.ARRAYS]
    name = next(iter(arrays))
    arrays[name] = Array(arrays[name].numpy() * np.float32("nan"))
    return reply


def stale_round(message: Message, context: Context, reply: Message) -> Message:
    reply.content[wire.IDENTITY]["round"] = 0
    return reply


def run_with(job, tmp_path, app: ClientApp, grid_class=LocalGrid, name="run") -> RunDirectory:
    grid = grid_class(app, job.cohort.clients, {JOB_KEY: job.canonical()})
    run = RunDirectory.create(tmp_path / name, job)
    start_run(job, grid, run)
    return run


def events_of(run: RunDirectory, kind: type):
    return [event for event in read_events(run.events_file) if isinstance(event, kind)]


@pytest.mark.parametrize(
    ("behaviour", "kind", "reason"),
    [(crash, "error", "the disk caught fire"), (send_nan, "refused", "NaN"), (stale_round, "refused", "wrong round")],
)
def test_a_bad_client_is_named_and_the_round_goes_on(behaviour, kind, reason, tiny_job, tmp_path):
    run = run_with(tiny_job(cohort__fraction=1.0), tmp_path, client_app(only(2, behaviour)))
    failures = events_of(run, ClientFailed)
    assert [f.client for f in failures] == ["client-2"] * 3
    assert all(f.kind == kind and reason in f.reason for f in failures)
    assert all(e.accepted == 5 and e.aggregated for e in events_of(run, RoundFinished))


def test_the_model_is_the_one_the_others_would_have_made_alone(tiny_job, tmp_path):
    settings = {"cohort__fraction": 1.0, "job__rounds": 2}
    refused = run_with(tiny_job(**settings), tmp_path, client_app(only(2, send_nan)), name="refused")
    failed = run_with(tiny_job(**settings), tmp_path, client_app(only(2, crash)), name="failed")
    assert refused.model_file.read_bytes() == failed.model_file.read_bytes()


def test_too_few_replies_stop_the_run_with_a_reason(tiny_job, tmp_path):
    job = tiny_job(cohort__fraction=1.0, cohort__min_replies=6)
    with pytest.raises(JobError, match=r"5 accepted updates, cohort.min_replies = 6 \(1 failed"):
        run_with(job, tmp_path, client_app(only(0, crash)))
    assert "min_replies" in events_of(RunDirectory(tmp_path / "run"), RunFailed)[0].reason


def test_too_few_replies_can_skip_the_round_and_keep_the_model(tiny_job, tmp_path):
    job = tiny_job(cohort__fraction=1.0, cohort__min_replies=6, cohort__on_shortfall="skip")
    run = run_with(job, tmp_path, client_app(only(0, crash, rounds=(2,))))
    assert [e.aggregated for e in events_of(run, RoundFinished)] == [True, False, True]
    measured = {e.round: e.metrics for e in events_of(run, Evaluated)}
    assert measured[1] == measured[2] != measured[3]


def test_one_failure_can_stop_the_run(tiny_job, tmp_path):
    job = tiny_job(cohort__fraction=1.0, cohort__on_failure="stop")
    with pytest.raises(JobError, match="client-1 error: RuntimeError: the disk caught fire"):
        run_with(job, tmp_path, client_app(only(1, crash)))


def test_a_retry_gives_the_same_model_as_no_failure(tiny_job, tmp_path):
    seen: set[tuple[int, int]] = set()

    def crash_once(message: Message, context: Context, reply: Message) -> Message:
        key = (context.node_id, int(message.content[wire.CONFIG]["round"]))
        if key not in seen:
            seen.add(key)
            raise RuntimeError("hiccup")
        return reply

    retried = run_with(tiny_job(cohort__on_failure="retry"), tmp_path, client_app(crash_once), name="retried")
    smooth = run_with(tiny_job(cohort__on_failure="retry"), tmp_path, client_app(), name="smooth")
    assert retried.model_file.read_bytes() == smooth.model_file.read_bytes()
    assert events_of(retried, ClientFailed) and all(e.failed == 0 for e in events_of(retried, RoundFinished))


def test_a_client_is_asked_at_most_twice(tiny_job, tmp_path):
    job = tiny_job(cohort__fraction=1.0, cohort__on_failure="retry", job__rounds=1)
    run = run_with(job, tmp_path, client_app(only(3, crash)))
    assert [f.attempt for f in events_of(run, ClientFailed)] == [1, 2]


def test_late_clients_are_named_and_not_waited_for(tiny_job, tmp_path):
    trained: list[str] = []

    def last_one_sleeps(message: Message, context: Context, reply: Message) -> Message:
        trained.append(f"client-{context.node_config['partition-id']}")
        time.sleep(4.0 if len(trained) == 6 else 0.0)
        return reply

    job = tiny_job(cohort__fraction=1.0, cohort__deadline_s=3.5, job__rounds=1)
    run = run_with(job, tmp_path, client_app(last_one_sleeps))
    assert [(f.client, f.kind) for f in events_of(run, ClientFailed)] == [(trained[-1], "late")]
    assert events_of(run, RoundFinished)[0].late == 1


class TwiceGrid(LocalGrid):
    """A network that delivers every reply twice, and once a reply that nobody asked for."""

    def pull_messages(self, message_ids):
        for reply in list(super().pull_messages(message_ids)):
            yield reply
            yield reply

    pull_updates = pull_messages


def test_duplicate_replies_count_once(tiny_job, tmp_path):
    twice = run_with(tiny_job(), tmp_path, client_app(), TwiceGrid, name="twice")
    once = run_with(tiny_job(), tmp_path, client_app(), name="once")
    assert twice.model_file.read_bytes() == once.model_file.read_bytes()
    refused = events_of(twice, ClientFailed)
    assert refused and {f.reason for f in refused} == {"duplicate reply"}
    assert all(e.accepted == 4 for e in events_of(twice, RoundFinished))


class ReversedGrid(LocalGrid):
    """A network on which the last client asked answers first."""

    def pull_messages(self, message_ids):
        return super().pull_messages([list(message_ids)[-1]])

    pull_updates = pull_messages


@pytest.mark.parametrize("strategy", ["FedAvg", "FedAdam", "FedMedian", "Krum", "QFedAvg", "FedTrimmedAvg"])
def test_order_of_arrival_does_not_change_a_bit(strategy, tiny_job, tmp_path):
    job = tiny_job(server__strategy=strategy)
    forward = run_with(job, tmp_path, client_app(), name="forward")
    backward = run_with(job, tmp_path, client_app(), ReversedGrid, name="backward")
    assert forward.model_file.read_bytes() == backward.model_file.read_bytes()


class MissingGrid(LocalGrid):
    """client-1 never connected."""

    def get_nodes(self):
        return [node for node in super().get_nodes() if node.name != "client-1"]


def test_a_client_that_is_not_connected_is_named_and_the_cohort_stays_the_same(tiny_job, tmp_path):
    job = tiny_job(cohort__fraction=1.0, cohort__deadline_s=0.5)
    run = run_with(job, tmp_path, client_app(), MissingGrid)
    assert {(f.client, f.reason) for f in events_of(run, ClientFailed)} == {("client-1", "not connected")}
    assert all(e.accepted == 5 and e.failed == 1 for e in events_of(run, RoundFinished))


def test_cohorts_depend_on_seed_and_round_only():
    names = [f"client-{i}" for i in range(50)]
    assert sample_cohort(names, 10, 0, "cohort", 3) == sample_cohort(names, 10, 0, "cohort", 3)
    assert sample_cohort(names, 10, 0, "cohort", 3) != sample_cohort(names, 10, 0, "cohort", 4)
    assert len(set(sample_cohort(names, 50, 1, "cohort", 1))) == 50


def test_global_random_state_does_not_matter(tiny_job, simulated):
    import random

    random.seed(1)
    first = simulated(tiny_job(server__strategy="FedMedian"), "first")
    random.seed(2)
    np.random.seed(7)
    second = simulated(tiny_job(server__strategy="FedMedian"), "second")
    assert first.model_file.read_bytes() == second.model_file.read_bytes()


def test_target_stops_the_run(tiny_job, simulated):
    run = simulated(tiny_job(job__rounds=50, evaluation__target=0.3, local__lr=0.5))
    measured = [e.metrics["accuracy"] for e in events_of(run, Evaluated)]
    assert measured[-1] >= 0.3 and all(value < 0.3 for value in measured[:-1]) and len(measured) < 50


def test_patience_stops_the_run_and_the_best_model_is_kept(tiny_job, simulated):
    run = simulated(tiny_job(job__rounds=50, evaluation__patience=2, evaluation__min_delta=0.2, local__lr=0.5))
    measured = [e.metrics["accuracy"] for e in events_of(run, Evaluated)]
    best = [e.round for e in events_of(run, Evaluated) if e.best][-1]
    assert len(measured) - 1 == best + 2
    assert run.best_file.read_bytes() != run.model_file.read_bytes()


def test_clients_evaluate_on_what_they_held_out(tiny_job, simulated):
    run = simulated(tiny_job(data__holdout=0.25, evaluation__clients=0.5, evaluation__every=3))
    on_clients = [e for e in events_of(run, Evaluated) if e.where == "clients"]
    assert [e.round for e in on_clients] == [3] and 0 <= on_clients[0].metrics["accuracy"] <= 1
    trained = sum(e.num_examples for e in events_of(run, ClientTrained) if e.round == 1)
    assert 0 < on_clients[0].num_examples < trained


def test_an_unknown_metric_is_named(tiny_job, simulated):
    with pytest.raises(JobError, match="'f1' is not among the task's metrics: loss, accuracy"):
        simulated(tiny_job(evaluation__metric="f1"))


def test_frozen_parameters_do_not_travel(tiny_job, simulated):
    thawed = simulated(tiny_job(), "thawed")
    frozen = simulated(tiny_job(task__freeze=["0.*"]), "frozen")
    sizes = [events_of(run, RoundFinished)[0].bytes_up for run in (thawed, frozen)]
    assert sizes[1] < sizes[0] / 2
    initial = build_model(tiny_job(), load_task(tiny_job())).state_dict()
    final = safetensors.numpy.load_file(frozen.model_file)
    assert final["0.weight"].tobytes() == initial["0.weight"].numpy().tobytes()
    assert final["2.weight"].tobytes() != initial["2.weight"].numpy().tobytes()


def test_cohort_in_the_events_is_the_one_that_trained(tiny_job, simulated):
    run = simulated(tiny_job())
    for started in events_of(run, RoundStarted):
        assert set(started.cohort) == {e.client for e in events_of(run, ClientTrained) if e.round == started.round}
