"""What a server may ask of a site: job, round, attempt, and arrays of the model's own names, shapes and dtypes.

Everything else that could steer training comes from the signed job. A request that brings more is refused, not ignored:
whoever sends a learning rate means something by it.
"""

import hashlib
from collections.abc import Mapping

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from fedplat import canonical, wire
from fedplat.errors import UsageError
from fedplat.job import Job
from fedplat.wire import Identity

Expected = Mapping[str, tuple[str, tuple[int, ...]]]
LAST_ATTEMPT = 2
CHUNK_BYTES = 5 << 20
"""Flower cuts arrays into objects of this size."""


def most_objects(expected: Expected) -> int:
    """Parts that a message with the job's arrays can have; a larger one is not even fetched."""
    sizes = (int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize for dtype, shape in expected.values())
    return 64 + sum(2 + size // CHUNK_BYTES + 1 for size in sizes)


def read_request(message: Message, job: Job, client: str, expected: Expected) -> tuple[Identity, str]:
    """The request's identity and digest, if it asks for nothing but what its job says."""
    content = message.content
    extra = sorted(set(content) - {wire.ARRAYS, wire.CONFIG, wire.PEERS})
    if extra or wire.records(content, MetricRecord):
        raise UsageError(f"the request brings '{extra[0] if extra else 'metrics'}', which no request has")
    asked = _identity(content, job)
    _require_arrays(content, expected)
    identity = Identity(asked.job, asked.round, asked.attempt, client)
    return identity, request_digest(identity, message.metadata.message_type, content)


def _identity(content: RecordDict, job: Job) -> Identity:
    try:
        identity = Identity.of(content, wire.CONFIG)
    except ValueError as error:
        raise UsageError(str(error)) from None
    if identity.job != job.digest:
        raise UsageError("the request is for another job than this run carries")
    if not 1 <= identity.round <= job.job.rounds:
        raise UsageError(f"round {identity.round} is none of this job's rounds, 1 to {job.job.rounds}")
    if not 1 <= identity.attempt <= LAST_ATTEMPT:
        raise UsageError(f"attempt {identity.attempt}: a round is asked for {LAST_ATTEMPT} times at most")
    told = wire.records(content, ConfigRecord)[wire.CONFIG]
    known = {
        "job": identity.job,
        "round": identity.round,
        "attempt": identity.attempt,
        "client": "",
        "server-round": identity.round,  # what Flower's strategies add by themselves
        "proximal-mu": job.proximal_mu,
    }
    for key, value in told.items():
        if key not in known:
            raise UsageError(f"the request sets '{key:.50}': hyper-parameters come from the signed job only")
        if value != known[key]:
            raise UsageError(f"the request says {key} = {value!r:.50}, its job says {known[key]!r:.50}")
    return identity


def _require_arrays(content: RecordDict, expected: Expected) -> None:
    records = wire.records(content, ArrayRecord)
    if set(records) != {wire.ARRAYS}:
        raise UsageError(f"the request must bring one array record, '{wire.ARRAYS}'")
    arrays = records[wire.ARRAYS]
    if set(arrays) != set(expected):
        wrong = sorted(set(arrays) ^ set(expected))[0]
        raise UsageError(f"the request's arrays are not the model's: '{wrong:.100}'")
    for name, (dtype, shape) in expected.items():
        told = (arrays[name].dtype, tuple(arrays[name].shape))
        if told != (dtype, shape):
            raise UsageError(f"array '{name}' is {told[0]} {told[1]}, the model's is {dtype} {shape}")
        array = wire.view_array(arrays[name])
        if (str(array.dtype), array.shape) != (dtype, shape):
            raise UsageError(f"array '{name}' is not what it says it is")


def request_digest(identity: Identity, kind: str, content: RecordDict) -> str:
    """What makes two requests the same: identity, kind and every byte of the arrays, not what peers say."""
    arrays = wire.records(content, ArrayRecord).get(wire.ARRAYS, ArrayRecord())
    parts = {name: hashlib.sha256(array.data).hexdigest() for name, array in arrays.items()}
    return canonical.digest([identity.job, identity.round, identity.attempt, kind, parts])
