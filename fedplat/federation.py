"""The data of a federation: who the clients are and which examples each one holds.

In a simulation every client's examples are a slice of the task's training data, chosen by
[data.partition]. Held-out rows are cut from each client's own slice, by its own random stream.
"""

from dataclasses import dataclass

import numpy as np
import torch

from fedplat.errors import UsageError
from fedplat.job import Job
from fedplat.partition import partition
from fedplat.streams import numpy_stream
from fedplat.task import Examples, Task, load_examples


def client_name(index: int) -> str:
    return f"client-{index}"


def natural_order(names: list[str]) -> list[str]:
    """client-2 before client-10, without caring what names look like."""
    return sorted(names, key=lambda name: (len(name), name))


@dataclass(frozen=True)
class ClientRows:
    """Row numbers of one client's examples in the task's training data."""

    train: np.ndarray
    holdout: np.ndarray


class FederationData:
    """All clients' examples, sharing one copy of the training data."""

    def __init__(self, job: Job, task: Task, examples: Examples | None = None) -> None:
        self._job = job
        # A worker process gets the examples in shared memory instead of loading its own copy.
        self.examples: Examples = load_examples(task, job.task.name, "train") if examples is None else examples
        self.parts = partition(
            job.data.partition,
            len(self.examples),
            job.cohort.clients,
            job.job.seed,
            labels=self.examples.partition_labels(),
            keys=self.examples.keys,
        )
        self._index = {client_name(i): i for i in range(job.cohort.clients)}

    def names(self) -> list[str]:
        return list(self._index)

    def rows(self, client: str) -> ClientRows:
        if client not in self._index:
            raise UsageError(f"unknown client '{client}': the job has client-0 … client-{len(self._index) - 1}")
        part = self.parts[self._index[client]]
        kept_out = min(round(len(part) * self._job.data.holdout), len(part) - 1)
        if kept_out == 0:
            return ClientRows(part, part[:0])
        shuffled = numpy_stream(self._job.job.seed, "holdout", client).permutation(part)
        return ClientRows(np.sort(shuffled[kept_out:]), np.sort(shuffled[:kept_out]))

    def train(self, client: str) -> Examples:
        return self.examples[torch.from_numpy(self.rows(client).train)]

    def holdout(self, client: str) -> Examples:
        return self.examples[torch.from_numpy(self.rows(client).holdout)]
