"""LocalGrid is a Flower Grid: somebody else's ServerApp and ClientApp run on it unchanged."""

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from fedplat.flower import new_context
from simulations.local_grid import LocalGrid

# --- somebody else's app: linear regression in NumPy, written against Flower's documentation ----------

TRUTH = np.array([2.0, -3.0, 0.5])
their_client, their_server = ClientApp(), ServerApp()


def their_data(context: Context) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(int(context.node_config["partition-id"]))
    inputs = rng.normal(size=(40, 3))
    return inputs, inputs @ TRUTH


@their_client.train()
def train(msg: Message, context: Context) -> Message:
    inputs, targets = their_data(context)
    weights = msg.content["arrays"]["w"].numpy()
    for _ in range(int(context.run_config["local-steps"])):
        weights = weights - float(msg.content["config"]["lr"]) * inputs.T @ (inputs @ weights - targets) / len(targets)
    calls = context.state.metric_records.get("calls", {"n": 0})["n"] + 1
    context.state["calls"] = MetricRecord({"n": calls})
    msg.content["config"]["lr"] = 99.0  # rude, but must not reach the next client
    metrics = MetricRecord({"num-examples": len(targets), "calls": calls})
    return Message(RecordDict({"arrays": ArrayRecord({"w": Array(weights)}), "metrics": metrics}), reply_to=msg)


@their_client.evaluate()
def evaluate(msg: Message, context: Context) -> Message:
    inputs, targets = their_data(context)
    loss = float(np.mean((inputs @ msg.content["arrays"]["w"].numpy() - targets) ** 2))
    metrics = MetricRecord({"num-examples": len(targets), "loss": loss})
    return Message(RecordDict({"metrics": metrics}), reply_to=msg)


@their_server.main()
def main(grid: Grid, context: Context) -> None:
    result = FedAvg(fraction_train=0.5, min_train_nodes=3).start(
        grid,
        ArrayRecord({"w": Array(np.zeros(3))}),
        num_rounds=8,
        train_config=ConfigRecord({"lr": 0.1}),
    )
    context.state["w"] = result.arrays
    context.state["loss"] = result.evaluate_metrics_clientapp[8]


def test_somebody_elses_app_runs_unchanged():
    run_config = {"local-steps": 10}
    grid = LocalGrid(their_client, 6, run_config)
    context = new_context(grid.run.run_id, 1, {}, dict(run_config))
    their_server(grid, context)
    np.testing.assert_allclose(context.state["w"]["w"].numpy(), TRUTH, atol=0.05)
    assert context.state["loss"]["loss"] < 0.01


def make_grid(train_function) -> LocalGrid:
    app = ClientApp()
    app.train()(train_function)
    return LocalGrid(app, 3, {})


def ask(grid: LocalGrid, *nodes: int) -> list[Message]:
    record = RecordDict({"config": ConfigRecord({"n": 1})})
    return [Message(record, dst_node_id=node, message_type="train") for node in nodes]


def test_a_clients_state_is_its_own_and_survives_between_messages():
    def remember(message: Message, context: Context) -> Message:
        seen = context.state.config_records.get("seen", {"ids": []})["ids"]
        context.state["seen"] = ConfigRecord({"ids": [*seen, context.node_id]})
        return Message(RecordDict({"seen": context.state["seen"].copy()}), reply_to=message)

    grid = make_grid(remember)
    nodes = list(grid.get_node_ids())
    for _ in range(2):
        replies = list(grid.send_and_receive(ask(grid, *nodes)))
    assert [reply.content["seen"]["ids"] for reply in replies] == [[node, node] for node in nodes]


def test_what_a_client_does_to_its_message_stays_with_it():
    def vandal(message: Message, context: Context) -> Message:
        found = message.content["config"]["n"]
        message.content["config"]["n"] = 1000
        return Message(RecordDict({"m": MetricRecord({"found": found})}), reply_to=message)

    replies = list(make_grid(vandal).send_and_receive(ask(make_grid(vandal), 1000, 1001, 1002)))
    assert [reply.content["m"]["found"] for reply in replies] == [1, 1, 1]


def test_an_exception_becomes_an_error_reply_with_the_right_addresses():
    def fail(message: Message, context: Context) -> Message:
        raise ValueError("no data here")

    (reply,) = make_grid(fail).send_and_receive(ask(make_grid(fail), 1001))
    assert reply.has_error() and "no data here" in reply.error.reason
    assert reply.metadata.src_node_id == 1001


def test_ctrl_c_in_a_client_is_not_swallowed():
    def interrupt(message: Message, context: Context) -> Message:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(make_grid(interrupt).send_and_receive(ask(make_grid(interrupt), 1000)))


def test_an_unknown_node_gives_an_error_reply():
    (reply,) = make_grid(lambda m, c: m).send_and_receive(ask(make_grid(lambda m, c: m), 5))
    assert reply.has_error() and "not connected" in reply.error.reason


def test_push_returns_at_once_and_pull_gives_what_was_asked_for():
    ran: list[int] = []

    def note(message: Message, context: Context) -> Message:
        ran.append(context.node_id)
        return Message(RecordDict(), reply_to=message)

    grid = make_grid(note)
    ids = list(grid.push_messages(ask(grid, 1000, 1001, 1002)))
    assert ran == []
    replies = [reply for _ in range(3) for reply in grid.pull_messages([ids[1]])]
    assert [reply.metadata.reply_to_message_id for reply in replies] == [ids[1]]
    assert not grid.nothing_to_come(ids)
    rest = [reply for _ in range(3) for reply in grid.pull_messages(ids)]
    assert {reply.metadata.reply_to_message_id for reply in rest} == {ids[0], ids[2]}
    assert grid.nothing_to_come(ids) and list(grid.pull_messages(["unknown"])) == []
