"""pfl-research 0.6: FederatedAveraging on SimulatedBackend, in its own environment.

    python -m benchmarks.peers.pfl_fedavg WORKLOAD ROUNDS
    python -m torch.distributed.run --standalone --nproc-per-node 2 -m benchmarks.peers.pfl_fedavg WORKLOAD ROUNDS

In pfl's favour: its evaluation of the first round is left out, batches aren't shuffled (it caches them), clients'
tensors are made before the first round.
"""

import sys
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from pfl.aggregate.simulate import SimulatedBackend  # type: ignore[import-not-found]
from pfl.algorithm.base import NNAlgorithmParams  # type: ignore[import-not-found]
from pfl.algorithm.federated_averaging import FederatedAveraging  # type: ignore[import-not-found]
from pfl.callback.base import TrainingProcessCallback  # type: ignore[import-not-found]
from pfl.data.dataset import Dataset  # type: ignore[import-not-found]
from pfl.data.federated_dataset import FederatedDataset  # type: ignore[import-not-found]
from pfl.data.sampling import get_user_sampler  # type: ignore[import-not-found]
from pfl.hyperparam.base import NNTrainHyperParams  # type: ignore[import-not-found]
from pfl.internal.ops import pytorch_ops  # type: ignore[import-not-found]
from pfl.metrics import Metrics  # type: ignore[import-not-found]
from pfl.model.pytorch import PyTorchModel  # type: ignore[import-not-found]
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.plain_training import ClientData, final_loss, fresh_model, print_outcome
from benchmarks.workloads import LR, SEED, WORKLOADS, Workload, now


class Learner(nn.Module):
    """A model with the two methods that pfl asks of it."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, inputs: Tensor) -> Tensor:
        return self.network(inputs)  # type: ignore[no-any-return]

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(self(inputs), targets)

    def metrics(self, inputs: Tensor, targets: Tensor) -> dict[str, Any]:
        raise NotImplementedError("nothing is evaluated")


class TrainOnly(FederatedAveraging):  # type: ignore[misc]
    """pfl evaluates every client before and after training in round 0, whatever evaluation_frequency says."""

    def get_next_central_contexts(self, *args: Any, **kwargs: Any) -> tuple[Any, Any, Any]:
        contexts, model, metrics = super().get_next_central_contexts(*args, **kwargs)
        return contexts and tuple(replace(context, do_evaluation=False) for context in contexts), model, metrics


class RoundEnds(TrainingProcessCallback):  # type: ignore[misc]
    def __init__(self) -> None:
        self.times: list[float] = []

    def after_central_iteration(self, *args: Any, **kwargs: Any) -> tuple[bool, Any]:
        self.times.append(now())
        return False, Metrics()


def run(workload: Workload, rounds: int) -> None:
    torch.set_num_threads(1)
    np.random.seed(SEED)
    data = ClientData(workload)
    users = {client: Dataset(data[client]) for client in range(workload.clients)}
    dataset = FederatedDataset(users.__getitem__, get_user_sampler("minimize_reuse", range(workload.clients)))
    learner = Learner(fresh_model(workload))
    ends = RoundEnds()
    TrainOnly().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=rounds,
            evaluation_frequency=rounds,
            train_cohort_size=workload.cohort,
            val_cohort_size=0,
        ),
        backend=SimulatedBackend(training_data=dataset, val_data=dataset),
        model=PyTorchModel(learner, torch.optim.SGD, torch.optim.SGD(learner.parameters(), 1.0)),
        model_train_params=NNTrainHyperParams(
            local_num_epochs=1, local_learning_rate=LR, local_batch_size=workload.batch_size
        ),
        callbacks=[ends],
        send_metrics_to_platform=False,
    )
    if pytorch_ops.distributed.global_rank == 0:
        print_outcome(ends.times, final_loss(workload, learner))
    if torch.distributed.is_initialized():
        torch.distributed.barrier()  # else the rank that ends first aborts the other
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    run(WORKLOADS[sys.argv[1]], int(sys.argv[2]))
