"""The compute limit: federated averaging as a bare PyTorch loop, in one process or split over several.

    python -m benchmarks.peers.bare_loop WORKLOAD ROUNDS PROCESSES

No messages, no checks, no metrics: the global model lies in shared memory, each process trains its share of the
cohort from it and adds the results up in a vector of its own.
"""

import sys
from multiprocessing.synchronize import Barrier

import numpy as np
import torch
from torch import Tensor, multiprocessing, nn

from benchmarks.plain_training import ClientData, final_loss, fresh_model, print_outcome, train_plainly
from benchmarks.workloads import WORKLOADS, Workload, now


def run(workload: Workload, rounds: int, processes: int) -> None:
    torch.set_num_threads(1)
    model = fresh_model(workload)
    weights = nn.utils.parameters_to_vector(model.parameters()).detach().share_memory_()
    sums = torch.zeros(processes, len(weights)).share_memory_()
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(processes)
    others = [
        context.Process(target=_work, args=(workload, rounds, weights, sums, rank, barrier))
        for rank in range(1, processes)
    ]
    for other in others:
        other.start()
    round_ends = _work(workload, rounds, weights, sums, 0, barrier)
    for other in others:
        other.join()
    _load(model, weights)
    print_outcome(round_ends, final_loss(workload, model))


def _work(workload: Workload, rounds: int, weights: Tensor, sums: Tensor, rank: int, barrier: "Barrier") -> list[float]:
    torch.set_num_threads(1)
    data, model, rng = ClientData(workload), fresh_model(workload), np.random.default_rng(0)
    round_ends = []
    for _ in range(rounds):
        cohort = rng.choice(workload.clients, workload.cohort, replace=False)  # the same in every process
        sums[rank].zero_()
        for client in cohort[rank :: len(sums)]:
            _load(model, weights)
            train_plainly(model, *data[client], workload.batch_size)
            sums[rank] += nn.utils.parameters_to_vector(model.parameters()).detach()
        barrier.wait()
        if rank == 0:
            torch.div(sums.sum(0), workload.cohort, out=weights)
            round_ends.append(now())
        barrier.wait()
    return round_ends


@torch.no_grad()
def _load(model: nn.Module, weights: Tensor) -> None:
    start = 0
    for parameter in model.parameters():
        parameter.copy_(weights[start : start + parameter.numel()].view_as(parameter))
        start += parameter.numel()


if __name__ == "__main__":
    run(WORKLOADS[sys.argv[1]], int(sys.argv[2]), int(sys.argv[3]))
