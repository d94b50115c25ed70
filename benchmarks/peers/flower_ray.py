"""Flower's own simulation runtime (Ray actors): an app as Flower's documentation writes it, in the Message API.

    python -m benchmarks.peers.flower_ray WORKLOAD ROUNDS PROCESSES

One CPU per client, one Ray actor per CPU. Batches are sliced from the client's tensors rather than drawn through a
DataLoader, whose cost is not Ray's.
"""

import os
import sys
from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

from benchmarks.plain_training import MODELS, ClientData, final_loss, fresh_model, print_outcome, train_plainly
from benchmarks.workloads import WORKLOADS, now

WORKLOAD = "FEDPLAT_BENCH_WORKLOAD"
client_app = ClientApp()


@cache
def _data(workload: str) -> ClientData:
    """Mapped once per actor, as Flower's examples cache their FederatedDataset."""
    return ClientData(WORKLOADS[workload])


@client_app.train()
def train(message: Message, context: Context) -> Message:
    torch.set_num_threads(1)
    workload = WORKLOADS[os.environ[WORKLOAD]]
    model = MODELS[workload.model]()
    model.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
    inputs, targets = _data(workload.key)[int(context.node_config["partition-id"])]
    train_plainly(model, inputs, targets, workload.batch_size)
    content = RecordDict(
        {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": len(targets)})}
    )
    return Message(content, reply_to=message)


class TimedFedAvg(FedAvg):
    """FedAvg that notes when each round's aggregate is ready and refuses one that lacks a client."""

    def __init__(self, cohort: int, clients: int) -> None:
        super().__init__(cohort / clients, 0.0, cohort, 0, clients)
        self.cohort = cohort
        self.round_ends: list[float] = []

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        replies = list(replies)
        answered = sum(reply.has_content() for reply in replies)
        if answered != self.cohort:
            raise RuntimeError(f"round {server_round}: {answered} of {self.cohort} clients answered")
        aggregate = super().aggregate_train(server_round, replies)
        self.round_ends.append(now())
        return aggregate


def run(key: str, rounds: int, processes: int) -> None:
    workload = WORKLOADS[key]
    server_app = ServerApp()

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        model = fresh_model(workload)
        strategy = TimedFedAvg(workload.cohort, workload.clients)
        result = strategy.start(grid, ArrayRecord(model.state_dict()), rounds)
        model.load_state_dict(result.arrays.to_torch_state_dict())
        print_outcome(strategy.round_ends, final_loss(workload, model))

    os.environ[WORKLOAD] = key
    run_simulation(
        server_app,
        client_app,
        num_supernodes=workload.clients,
        backend_config={
            "init_args": {"num_cpus": processes},
            "client_resources": {"num_cpus": 1.0, "num_gpus": 0.0},
        },
    )


if __name__ == "__main__":
    # Imported by name, so that actors get the ClientApp by reference and keep what it caches, as under `flwr run`.
    if not TYPE_CHECKING:
        from benchmarks.peers.flower_ray import run
    run(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
