"""SCAFFOLD: federated averaging that corrects the drift of clients whose data differ.

Karimireddy, Kale, Mohri, Reddi, Stich, Suresh: "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning",
ICML 2020, https://arxiv.org/abs/1910.06378, Algorithm 1 with option II. This is the server half; the client half is
`client_app/scaffold.py`. Of the N clients, those in S answered:

    x ← x + global_lr · mean(y − x)
    c ← c + |S| / N · mean(Δc)

c travels beside the model as `scaffold/<parameter>`, one array for each parameter that is trained and travels, so it is
encoded, checked, reduced, checkpointed and resumed like the model, and this strategy itself remembers nothing.

Unlike the paper's, both means are weighted by examples, as everywhere in fedplat: the objective is the loss over all
examples, not over all clients, and c is that objective's gradient. With equal clients the two are the same.
Buffers (BatchNorm's statistics) have no gradient: they take the mean, whatever global_lr is.
"""

import math
from collections.abc import Iterable

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg

from fedplat import wire
from fedplat.model import Arrays


class Scaffold(FedAvg):
    """The server half. `num_clients` is the paper's N: all clients, not only those of a round."""

    def __init__(self, num_clients: int, global_lr: float = 1.0) -> None:
        super().__init__(min_train_nodes=1, min_evaluate_nodes=1, min_available_nodes=1)
        if num_clients < 1:
            raise ValueError(f"num_clients must be at least 1 (got {num_clients})")
        if not (math.isfinite(global_lr) and global_lr > 0):
            raise ValueError(f"global_lr must be > 0 (got {global_lr})")
        self.num_clients, self.global_lr = num_clients, global_lr
        self._sent: Arrays = {}

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Send x and c."""
        self._sent = wire.decode_arrays(arrays)
        return super().configure_train(server_round, arrays, config, grid)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Send x alone: nobody needs c to measure a model."""
        model = ArrayRecord({name: array for name, array in arrays.items() if not name.startswith(wire.CONTROL)})
        return super().configure_evaluate(server_round, model, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The new x and c, from all replies or from the one that is their mean."""
        received = [reply for reply in replies if not reply.has_error()]
        mean, metrics = super().aggregate_train(server_round, received)
        if mean is None:
            return None, metrics
        share = sum(_updates_in(reply) for reply in received) / self.num_clients
        means = wire.decode_arrays(mean)
        return wire.encode_arrays({name: self._step(name, means[name], share) for name in self._sent}), metrics

    def _step(self, name: str, mean: np.ndarray, share: float) -> np.ndarray:
        """One array after the round; computed in double precision."""
        before = self._sent[name]
        if name.startswith(wire.CONTROL):
            return (before + share * mean.astype(np.float64)).astype(before.dtype)
        if wire.CONTROL + name not in self._sent:
            return mean
        # Written like this, global_lr = 1 is exactly the mean: FedAvg, to the last bit.
        stepped = (1 - self.global_lr) * before.astype(np.float64) + self.global_lr * mean.astype(np.float64)
        return np.asarray(stepped.astype(before.dtype))


def _updates_in(reply: Message) -> int:
    """How many clients a reply speaks for."""
    count = wire.records(reply.content, MetricRecord)[wire.METRICS].get(wire.NUM_UPDATES, 1)
    return count if isinstance(count, int) else 1
