"""Deal a table of examples out to clients.

Laws, held by property tests for every kind: every example is in exactly one partition, no client
is empty, and the result depends only on the specification, the data's labels or keys, and the seed.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedplat.errors import UsageError
from fedplat.partition_spec import (
    Capacity,
    Dirichlet,
    Explicit,
    HashKey,
    Iid,
    PartitionSpec,
    Quantity,
    Range,
    Shards,
)
from fedplat.streams import numpy_stream

Indices = np.ndarray


def partition(
    spec: PartitionSpec,
    num_examples: int,
    num_clients: int,
    seed: int,
    *,
    labels: np.ndarray | None = None,
    keys: Sequence[str] | None = None,
) -> list[Indices]:
    """Row numbers of each client's examples, each client's in ascending order."""
    if num_clients > num_examples:
        raise UsageError(
            f"cohort.clients = {num_clients} but the task has only {num_examples} training examples: "
            "every client needs at least one. Lower cohort.clients"
        )
    rng = numpy_stream(seed, "partition", spec.model_dump_json())
    match spec:
        case Iid():
            parts = np.array_split(rng.permutation(num_examples), num_clients)
        case Range():
            parts = np.array_split(np.arange(num_examples), num_clients)
        case Dirichlet():
            parts = _dirichlet(spec, _required(labels, "dirichlet"), num_clients, rng)
        case Shards():
            parts = _shards(spec, _required(labels, "shards"), num_clients, rng)
        case Quantity():
            parts = _quantity(spec, num_examples, num_clients, rng)
        case Capacity():
            parts = _capacity(spec, num_examples, num_clients, rng)
        case HashKey():
            parts = _hash(spec, keys, num_examples, num_clients)
        case Explicit():
            parts = _explicit(spec, num_examples, num_clients)
        case _:
            raise UsageError(f"data.partition: {type(spec).__name__} has no implementation")
    _refuse_empty(parts)
    return [np.sort(part).astype(np.int64) for part in parts]


def _required(labels: np.ndarray | None, kind: str) -> np.ndarray:
    if labels is None:
        raise UsageError(
            f"data.partition.kind = '{kind}' needs a label per example, and this task's targets are not "
            "integers: set Examples.labels in the task, or use iid, quantity or capacity"
        )
    return labels


def _refuse_empty(parts: Sequence[Indices]) -> None:
    empty = [i for i, part in enumerate(parts) if len(part) == 0]
    if empty:
        names = ", ".join(f"client-{i}" for i in empty[:5]) + (", …" if len(empty) > 5 else "")
        raise UsageError(
            f"data.partition leaves {len(empty)} client(s) without examples ({names}): "
            "lower cohort.clients or choose another partition"
        )


def _cut(order: Indices, shares: np.ndarray) -> list[Indices]:
    """Cut a sequence into consecutive pieces whose sizes follow `shares` (which sum to one)."""
    bounds = np.rint(np.cumsum(shares)[:-1] * len(order)).astype(np.int64)
    return np.split(order, np.clip(bounds, 0, len(order)))


def _dirichlet(spec: Dirichlet, labels: np.ndarray, num_clients: int, rng: np.random.Generator) -> list[Indices]:
    pieces: list[list[Indices]] = [[] for _ in range(num_clients)]
    for label in np.unique(labels):
        rows = rng.permutation(np.flatnonzero(labels == label))
        shares = _dirichlet_draw(spec.alpha, num_clients, rng)
        for client, piece in zip(pieces, _cut(rows, shares), strict=True):
            client.append(piece)
    return _top_up([np.concatenate(client) for client in pieces], spec.min_examples, rng)


def _dirichlet_draw(alpha: float, size: int, rng: np.random.Generator) -> np.ndarray:
    shares = rng.dirichlet(np.full(size, min(alpha, 1e9)))  # beyond that gamma draws overflow, and it is IID anyway
    if not np.isfinite(shares).all():  # every gamma draw underflowed: the limit is one client taking all
        shares = np.zeros(size)
        shares[rng.integers(size)] = 1.0
    return shares


def _top_up(parts: list[Indices], least: int, rng: np.random.Generator) -> list[Indices]:
    """Move random examples from the largest clients to those below `least`."""
    total = sum(len(part) for part in parts)
    if total < least * len(parts):
        raise UsageError(
            f"data.partition.min_examples = {least} needs {least * len(parts)} examples for "
            f"{len(parts)} clients; there are {total}"
        )
    pools = [list(rng.permutation(part)) for part in parts]
    sizes = np.array([len(pool) for pool in pools])
    for client in np.flatnonzero(sizes < least):
        while sizes[client] < least:
            donor = int(np.argmax(sizes))
            pools[client].append(pools[donor].pop())
            sizes[client] += 1
            sizes[donor] -= 1
    return [np.array(pool, dtype=np.int64) for pool in pools]


def _shards(spec: Shards, labels: np.ndarray, num_clients: int, rng: np.random.Generator) -> list[Indices]:
    count = num_clients * spec.per_client
    if count > len(labels):
        raise UsageError(
            f"data.partition.per_client = {spec.per_client} makes {count} shards of {len(labels)} examples: lower it"
        )
    by_label = np.argsort(labels, kind="stable")
    shards = np.array_split(by_label, count)
    dealt = rng.permutation(count).reshape(num_clients, spec.per_client)
    return [np.concatenate([shards[s] for s in hand]) for hand in dealt]


def _quantity(spec: Quantity, num_examples: int, num_clients: int, rng: np.random.Generator) -> list[Indices]:
    shares = _dirichlet_draw(spec.alpha, num_clients, rng)
    return _top_up(_cut(rng.permutation(num_examples), shares), spec.min_examples, rng)


def _capacity(spec: Capacity, num_examples: int, num_clients: int, rng: np.random.Generator) -> list[Indices]:
    if len(spec.capacities) > num_clients:
        raise UsageError(f"data.partition.capacities has {len(spec.capacities)} numbers for {num_clients} clients")
    capacities = np.resize(np.array(spec.capacities, dtype=np.float64), num_clients)
    parts = _cut(rng.permutation(num_examples), capacities / capacities.sum())
    return _top_up(parts, 1, rng)


def _hash(spec: HashKey, keys: Sequence[str] | None, num_examples: int, num_clients: int) -> list[Indices]:
    # Without keys each row is its own key: still a stable spread, and new rows never move old ones.
    texts = keys if keys is not None else [str(i) for i in range(num_examples)]
    digests = (hashlib.sha256(f"{spec.salt}\0{key}".encode()).digest()[:8] for key in texts)
    owner = np.array([int.from_bytes(d, "big") % num_clients for d in digests])
    return [np.flatnonzero(owner == client) for client in range(num_clients)]


def _explicit(spec: Explicit, num_examples: int, num_clients: int) -> list[Indices]:
    lists = spec.indices if spec.indices is not None else _read_lists(spec.file)
    where = "data.partition.indices" if spec.indices is not None else str(spec.file)
    if len(lists) != num_clients:
        raise UsageError(f"{where}: {len(lists)} lists for cohort.clients = {num_clients}")
    if sorted(row for rows in lists for row in rows) != list(range(num_examples)):
        raise UsageError(f"{where}: every example from 0 to {num_examples - 1} must be in exactly one list")
    return [np.array(rows, dtype=np.int64) for rows in lists]


def _read_lists(file: str | None) -> list[list[int]]:
    if file is None:
        raise UsageError("data.partition.kind = 'explicit' needs indices or file")
    try:
        lists: list[list[int]] = json.loads(Path(file).read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"{file}: not a readable JSON file: {error}") from None
    is_lists = isinstance(lists, list) and all(isinstance(rows, list) for rows in lists)
    if not is_lists or not all(isinstance(i, int) for rows in lists for i in rows):
        raise UsageError(f"{file}: must be a JSON list of lists of example numbers")
    return lists
