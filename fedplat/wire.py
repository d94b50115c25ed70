"""What a server and a client say to each other, in Flower records.

A request carries the global arrays and an identity: job digest, round, attempt. Nothing else that
it says is obeyed: hyper-parameters come from the job. A reply carries the update, its metrics, and the
identity it answers, so that the server can tell a stale or misdirected reply from a fresh one.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from typing import TypeVar

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

ARRAYS, CONFIG, METRICS, IDENTITY = "arrays", "config", "metrics", "identity"
NUM_EXAMPLES = "num-examples"
EQUAL_WEIGHT = 1
"""The number of examples that every private client claims: how many it has is its own business."""
NUM_UPDATES = "num-updates"
"""In a reply that is a mean: how many updates it was taken over."""
CONTROL = "scaffold/"
"""SCAFFOLD's control variate of parameter p travels beside the model as `scaffold/p`."""
CLIP_NORM = "privacy/clip_norm"
"""An adaptive clip norm travels beside the model: to the client its value, back what the client makes of it."""
SIMULATED = "simulated"
"""In a node's own config: a virtual client, whose spends are in the simulation's ledger and in no site's."""
SITE = "site"
"""In a real site's reply: its signed statement, which the server relays; see `privacy.ledger_heads`."""
PEERS = "peers"
"""In a request to a real site: the newest statement of every other site."""
AGAIN = "again"
"""In a real site's reply: it can't answer yet, and why; the same request may be sent again."""
REFUSED = "refused"
"""In a real site's reply: why it refuses. A content like any other, so that it can carry the site's statement."""
NPY_HEADER_BYTES = 10_000
"""No .npy header is longer."""
JOB_KEY = "job"
"""The one run-config key that carries the job."""

Record = TypeVar("Record", ArrayRecord, ConfigRecord, MetricRecord)


def records(content: RecordDict, kind: type[Record]) -> dict[str, Record]:
    """The records of one kind.

    Not `content.array_records`: that view holds a bound method of itself (Flower 1.41, `_SyncedDict`), a cycle
    that keeps the whole message, weights included, until the garbage collector looks at its oldest generation.
    """
    return {key: record for key, record in content.items() if isinstance(record, kind)}


@dataclass(frozen=True)
class Identity:
    """Which release a message is about. Flower's own run id changes when a server restarts; this doesn't."""

    job: str
    round: int
    attempt: int
    client: str = ""

    def record(self) -> ConfigRecord:
        return ConfigRecord({"job": self.job, "round": self.round, "attempt": self.attempt, "client": self.client})

    @classmethod
    def of(cls, content: RecordDict, key: str) -> "Identity":
        record = records(content, ConfigRecord).get(key)
        if record is None:
            raise ValueError(f"message has no '{key}' record")
        fields = {name: record.get(name, "") for name in ("job", "round", "attempt", "client")}
        job, number, attempt, client = fields.values()
        if not (isinstance(job, str) and isinstance(client, str)):
            raise ValueError("identity: job and client must be text")
        if type(number) is not int or type(attempt) is not int:  # True is no round
            raise ValueError("identity: round and attempt must be whole numbers")
        return cls(job, number, attempt, client)


def encode_arrays(arrays: Mapping[str, np.ndarray]) -> ArrayRecord:
    return ArrayRecord({name: Array(np.asarray(array, order="C")) for name, array in arrays.items()})


def decode_arrays(record: ArrayRecord) -> dict[str, np.ndarray]:
    """In C order, whatever order was sent: safetensors writes other arrays down wrong, without a word."""
    return {name: np.asarray(array.numpy(), order="C") for name, array in record.items()}


def view_arrays(record: ArrayRecord) -> dict[str, np.ndarray]:
    """The arrays in the message's own memory, read-only: a large model need not be there twice."""
    return {name: view_array(array) for name, array in record.items()}


def view_array(array: Array) -> np.ndarray:
    """What the .npy bytes of an array hold, in place and in C order; ValueError for anything else.

    Never unpickles or unzips. Only an array that was sent in another order is copied (see `decode_arrays`).
    """
    if array.stype != "numpy.ndarray":
        raise ValueError(f"unknown serialisation {array.stype!r:.50}")
    shape, fortran, dtype, start = _npy_header(array.data)
    if dtype.hasobject:
        raise ValueError("an array of objects")
    size = math.prod(shape)
    flat = np.frombuffer(array.data, dtype, size, start) if size else np.empty(0, dtype)
    flat.flags.writeable = False
    return np.asarray(flat.reshape(shape, order="F" if fortran else "C"), order="C")


def npy_header(data: bytes) -> tuple[tuple[int, ...], np.dtype]:
    """Shape and dtype that .npy bytes themselves claim; `np.load` would believe them, or unzip an archive."""
    shape, _, dtype, _ = _npy_header(data)
    return shape, dtype


def _npy_header(data: bytes) -> tuple[tuple[int, ...], bool, np.dtype, int]:
    file = BytesIO(memoryview(data)[:NPY_HEADER_BYTES])
    version = np.lib.format.read_magic(file)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"unknown .npy version {version}")
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran, dtype = read(file)
    return shape, fortran, dtype, file.tell()


def reply_content(
    identity: Identity, num_examples: int, metrics: Mapping[str, float], arrays: ArrayRecord | None = None
) -> RecordDict:
    values: dict[str, int | float | list[int] | list[float]] = {NUM_EXAMPLES: num_examples, **metrics}
    content = RecordDict({METRICS: MetricRecord(values), IDENTITY: identity.record()})
    if arrays is not None:
        content[ARRAYS] = arrays
    return content


def payload_bytes(content: RecordDict) -> int:
    """Size of the arrays in a message: what dominates on a network."""
    return sum(len(array.data) for record in records(content, ArrayRecord).values() for array in record.values())
