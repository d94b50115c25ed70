"""One result: the same job and seed give the same model on every engine, whatever happens to the workers."""

import numpy as np
import pytest
import safetensors.numpy
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedplat.errors import UsageError
from fedplat.events import ClientFailed, ClientTrained, RoundFinished, RoundStarted, read_events
from fedplat.rundir import RunDirectory
from server_app.strategies import strategy_names
from simulations.local_grid import LocalGrid
from simulations.process_engine import ProcessEngine
from simulations.simulate import resume, simulate
from tests.server_app.test_strategies import ARGUMENTS


def model_of(run: RunDirectory) -> dict[str, np.ndarray]:
    return dict(safetensors.numpy.load_file(run.model_file))


def assert_close(one: RunDirectory, other: RunDirectory) -> None:
    for name, array in model_of(one).items():
        np.testing.assert_allclose(model_of(other)[name], array, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("workers", [1, 3])
def test_process_equals_serial_bit_for_bit(workers, tiny_job, simulated):
    serial = simulated(tiny_job(), "serial")
    pooled = simulated(tiny_job(simulation__engine="process", simulation__workers=workers), "pooled")
    assert pooled.model_file.read_bytes() == serial.model_file.read_bytes()


@pytest.mark.parametrize("chunk", [1, 2, 0])
@pytest.mark.parametrize("strategy", ["FedAvg", "FedAdam", "FedMedian"])
def test_vector_equals_serial_within_float_tolerance(chunk, strategy, tiny_job, simulated):
    serial = simulated(tiny_job(server__strategy=strategy), "serial")
    job = tiny_job(server__strategy=strategy, simulation__engine="vector", simulation__chunk=chunk)
    assert_close(serial, simulated(job, "vector"))


@pytest.mark.parametrize("strategy", strategy_names())
def test_every_strategy_runs_on_the_vector_engine(strategy, tiny_job, simulated):
    job = tiny_job(server__strategy=strategy, server__args=ARGUMENTS.get(strategy, {}), simulation__engine="vector")
    rounds = [e for e in read_events(simulated(job).events_file) if isinstance(e, RoundFinished)]
    assert [e.accepted for e in rounds] == [4, 4, 4]


@pytest.mark.parametrize("engine", ["vector", "process"])
def test_repeating_a_run_gives_the_same_bits(engine, tiny_job, simulated):
    job = tiny_job(simulation__engine=engine)
    first, second = simulated(job, "first"), simulated(job, "second")
    assert first.model_file.read_bytes() == second.model_file.read_bytes()


@pytest.mark.parametrize("engine", ["vector", "process", "auto"])
def test_resume_equals_never_stopped_on_every_engine(engine, tiny_job, simulated, tmp_path):
    job = tiny_job(simulation__engine=engine, job__rounds=5, server__strategy="FedAdam")
    whole = simulated(job, "whole")
    broken = RunDirectory.create(tmp_path / "broken", whole.job())

    def stop(event):
        if isinstance(event, RoundStarted) and event.round == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulate(whole.job(), broken, (stop,))
    resume(RunDirectory(broken.path))
    assert broken.model_file.read_bytes() == whole.model_file.read_bytes()


def test_auto_settles_on_an_engine_and_writes_it_down(tiny_job, simulated):
    run = simulated(tiny_job(simulation__engine="auto"))
    assert run.job().simulation.engine in ("serial", "vector", "process")


def test_events_of_stacked_clients_are_those_of_single_ones(tiny_job, simulated):
    def seen(run):
        trained = [e for e in read_events(run.events_file) if isinstance(e, ClientTrained)]
        return sorted((e.round, e.client, e.num_examples, e.metrics["steps"], round(e.update_norm, 3)) for e in trained)

    serial, vector = simulated(tiny_job(), "s"), simulated(tiny_job(simulation__engine="vector"), "v")
    assert seen(serial) == seen(vector)
    bytes_of = [
        [e.bytes_up for e in read_events(r.events_file) if isinstance(e, RoundFinished)] for r in (serial, vector)
    ]
    assert bytes_of[0] == bytes_of[1]


# --- faults -------------------------------------------------------------------------------------

FAULTS = {
    "fail": ("error", "injected fault"),
    "drop": ("late", "no reply"),
    "late": ("late", "no reply"),
    "nan": ("refused", "NaN"),
}


@pytest.mark.parametrize("engine", ["serial", "vector", "process"])
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_strike_repeatably_and_the_run_goes_on(fault, engine, tiny_job, simulated):
    job = tiny_job(
        simulation__engine=engine, simulation__faults={fault: 0.4}, cohort__fraction=1.0, simulation__workers=1
    )
    runs = [simulated(job, name) for name in ("one", "two")]
    failures = [[e for e in read_events(r.events_file) if isinstance(e, ClientFailed)] for r in runs]
    kind, reason = FAULTS[fault]
    assert failures[0] and all(f.kind == kind and reason in f.reason for f in failures[0])
    assert {(f.round, f.client) for f in failures[0]} == {(f.round, f.client) for f in failures[1]}
    assert runs[0].model_file.read_bytes() == runs[1].model_file.read_bytes()


def test_the_same_clients_fail_on_every_engine(tiny_job, simulated):
    def struck(engine):
        job = tiny_job(simulation__engine=engine, simulation__faults={"fail": 0.3, "nan": 0.2}, cohort__fraction=1.0)
        events = read_events(simulated(job, engine).events_file)
        return {(e.round, e.client, e.kind) for e in events if isinstance(e, ClientFailed)}

    assert struck("serial") == struck("vector")


def test_a_crashed_worker_is_replaced_and_its_client_tried_again(tiny_job, simulated):
    whole = simulated(tiny_job(), "whole")
    job = tiny_job(simulation__engine="process", simulation__workers=2, simulation__faults={"crash": 0.5})
    crashed = simulated(job, "crashed")
    assert not [e for e in read_events(crashed.events_file) if isinstance(e, ClientFailed)]
    assert crashed.model_file.read_bytes() == whole.model_file.read_bytes()


# --- somebody else's app on worker processes ------------------------------------------------------


def deadly_app() -> ClientApp:
    """A client that kills its worker every time, beside one that counts."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        import os

        from flwr.app import ConfigRecord

        if context.node_config["partition-id"] == 1:
            os._exit(9)
        count = context.state.config_records.get("n", {"count": 0})["count"] + 1
        context.state["n"] = ConfigRecord({"count": count, "process": os.getpid()})
        return Message(RecordDict({"n": context.state["n"].copy()}), reply_to=message)

    return app


def test_a_client_that_always_kills_its_worker_is_counted_as_failed_and_the_others_answer():
    engine = ProcessEngine(deadly_app, workers=2)
    grid = LocalGrid(deadly_app(), 4, {}, engine)
    try:
        for expected in (1, 2):
            requests = [Message(RecordDict(), dst_node_id=1000 + i, message_type="train") for i in range(4)]
            replies = list(grid.send_and_receive(requests, timeout=60))
            assert [reply.has_error() for reply in replies] == [False, True, False, False]
            assert "died twice" in replies[1].error.reason
            answered = [replies[i].content["n"] for i in (0, 2, 3)]
            assert [record["count"] for record in answered] == [expected] * 3
    finally:
        grid.close()


def test_somebody_elses_app_gives_the_same_result_on_processes():
    from fedplat.flower import new_context
    from tests.simulations.test_local_grid import their_client, their_server

    weights = []
    for engine in (None, ProcessEngine(load_theirs, workers=2)):
        grid = LocalGrid(their_client, 6, {"local-steps": 10}, engine)
        context = new_context(grid.run.run_id, 1, {}, {"local-steps": 10})
        import random

        random.seed(0)
        their_server(grid, context)
        grid.close()
        weights.append(context.state["w"]["w"].numpy())
    np.testing.assert_allclose(weights[0], weights[1], rtol=1e-9)


def load_theirs() -> ClientApp:
    from tests.simulations.test_local_grid import their_client

    return their_client


def test_far_more_workers_than_cores_are_refused(tiny_job, simulated):
    with pytest.raises(UsageError, match="would only take memory"):
        simulated(tiny_job(simulation__engine="process", simulation__workers=999))
