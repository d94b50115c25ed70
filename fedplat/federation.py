"""The data of a federation: who the clients are and which examples each one holds.

In a simulation every client's examples are a slice of the task's training data, chosen by
[data.partition]. Held-out rows are cut from each client's own slice, by its own random stream.
"""

import hashlib
from dataclasses import dataclass

import numpy as np
import torch

from fedplat import canonical
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

    def __init__(self, job: Job, task: Task, examples: Examples | None = None, owner: str | None = None) -> None:
        """`owner`: the one client whose own data these examples are; without, they are everybody's."""
        self._job = job
        # A worker process gets the examples in shared memory instead of loading its own copy.
        self.examples: Examples = load_examples(task, job.task.name, "train") if examples is None else examples
        self._split: dict[str, ClientRows] = {}
        if owner is not None:
            self.parts, self._index = [np.arange(len(self.examples))], {owner: 0}
            return
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
            raise UsageError(f"unknown client '{client}': this is the data of {', '.join(list(self._index)[:3])} …")
        part = self.parts[self._index[client]]
        if self._job.privacy is not None and self._job.privacy.unit == "sample" and self._job.data.holdout:
            return self._split_each(client, part)
        kept_out = min(round(len(part) * self._job.data.holdout), len(part) - 1)
        if kept_out == 0:
            return ClientRows(part, part[:0])
        shuffled = numpy_stream(self._job.job.seed, "holdout", client).permutation(part)
        return ClientRows(np.sort(shuffled[kept_out:]), np.sort(shuffled[:kept_out]))

    def _split_each(self, client: str, part: np.ndarray) -> ClientRows:
        """Each example is held out or not by itself, by its own bytes: one more changes nothing for the others.

        A permutation would deal them all anew, and privacy of single examples would mean nothing.
        """
        if client not in self._split:
            prefix = canonical.dumps([self._job.job.seed, "holdout", client]).encode()
            limit = int(self._job.data.holdout * 2**64)
            out = np.array([self._draw(prefix, int(row)) < limit for row in part], bool)
            self._split[client] = ClientRows(part[~out], part[out])
        return self._split[client]

    def _draw(self, prefix: bytes, row: int) -> int:
        content = [self.examples.inputs[row].numpy().tobytes(), self.examples.targets[row].numpy().tobytes()]
        return int.from_bytes(hashlib.sha256(b"".join([prefix, *content])).digest()[:8], "little")

    def train(self, client: str) -> Examples:
        return self.examples[torch.from_numpy(self.rows(client).train)]

    def holdout(self, client: str) -> Examples:
        return self.examples[torch.from_numpy(self.rows(client).holdout)]
