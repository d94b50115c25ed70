"""Checks on every reply before it may touch the model.

A reply is refused, with a reason that names what is wrong, if it answers another job, round or client,
if its arrays are not exactly those of the model in name, shape and dtype, if any number is NaN or
infinite, or if the update lies absurdly far from the global model. In a private job it is also refused if it claims a
weight of its own or brings a metric that no budget has paid for.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord

from fedplat import wire
from fedplat.job import Job
from fedplat.model import Arrays
from fedplat.wire import Identity
from server_app.mean import MAX_TOTAL_WEIGHT, RANGE_BITS, peak
from server_app.stack import UpdateStack

_CHUNK = 1 << 13
"""Coordinates per pass. OpenBLAS spreads a dot product of more than 10,000 over threads: their number would show in
the last bits, and they spin while they wait for the next one."""


LOSS = "loss"
PUBLIC_METRICS = frozenset({"steps", "lr"})
"""All that a private client may report of its training: these follow from the job, not from its data."""
LARGEST_METRIC = 1e100
"""Beyond this a weighted sum of metrics could overflow."""
NOT_FINITE = "update has NaN or infinite values"
BAD_CLIP_NORM = f"'{wire.CLIP_NORM}' is negative or not finite"


def _too_far(norm: float, max_norm: float) -> str:
    return f"update norm {norm:.3g} exceeds server.max_update_norm = {max_norm:g}"


class Refused(Exception):
    """A reply that failed a check."""


@dataclass(frozen=True)
class Report:
    """The numbers of a reply that passed."""

    num_examples: int
    metrics: dict[str, float]


@dataclass(frozen=True)
class Update(Report):
    arrays: Arrays
    norm: float


def allowed_examples(cohort_size: int, least: int = 1) -> range:
    """How many examples one reply may claim: a fair share of what the mean can hold, so that no reply, whatever the
    order of arrival, leaves too little for the others."""
    return range(least, MAX_TOTAL_WEIGHT // cohort_size + 1)


@dataclass(frozen=True)
class Rules:
    """What a job allows a training reply to be."""

    max_norm: float
    examples: range
    private: bool = False

    @classmethod
    def of(cls, job: Job) -> "Rules":
        if job.privacy is None:
            return cls(job.server.max_update_norm, allowed_examples(job.cohort.cohort_size))
        # Equal weights: a client's number of examples is private, and weights would change the sensitivity.
        return cls(job.server.max_update_norm, range(1, 2), private=True)

    def require_metrics(self, names: Collection[str]) -> None:
        if not self.private and LOSS not in names:
            raise Refused(f"no metric '{LOSS}'")
        unpaid = sorted(set(names) - PUBLIC_METRICS) if self.private else []
        if unpaid:
            raise Refused(f"metric '{unpaid[0]:.50}' of a private job: it is a release that no budget has paid for")


def check_report(reply: Message, request: Message, expected: Identity, examples: range) -> Report:
    """Identity and metrics: what every reply must get right."""
    if reply.metadata.src_node_id != request.metadata.dst_node_id:
        raise Refused("sent by another node than was asked")
    try:
        claimed = Identity.of(reply.content, wire.IDENTITY)
    except ValueError as error:
        raise Refused(str(error)) from None
    for field in ("job", "round", "client", "attempt"):
        if getattr(claimed, field) != getattr(expected, field):
            raise Refused(f"wrong {field}: {getattr(claimed, field)!r}, expected {getattr(expected, field)!r}")
    return _check_metrics(reply, examples)


def _check_metrics(reply: Message, examples: range) -> Report:
    records = wire.records(reply.content, MetricRecord)
    if set(records) != {wire.METRICS}:
        raise Refused(f"expected one metric record '{wire.METRICS}', got {sorted(records)}")
    metrics: dict[str, float] = {}
    for name, value in records[wire.METRICS].items():
        if not isinstance(value, int | float) or not -LARGEST_METRIC <= value <= LARGEST_METRIC:
            raise Refused(f"metric '{name}' is not a reasonable number: {value!r:.50}")
        metrics[name] = float(value)
    count = records[wire.METRICS].get(wire.NUM_EXAMPLES)
    if not isinstance(count, int) or count not in examples:
        limits = f"from {examples.start} to {examples.stop - 1}"
        raise Refused(f"'{wire.NUM_EXAMPLES}' must be a whole number {limits}, got {count!r:.50}")
    del metrics[wire.NUM_EXAMPLES]
    return Report(count, metrics)


def check_update(
    reply: Message,
    request: Message,
    expected: Identity,
    model: Mapping[str, np.ndarray],
    max_norm: float,
    examples: range,
    private: bool = False,
) -> Update:
    """A training reply: identity, metrics, and arrays that fit the global model."""
    report = check_report(reply, request, expected, examples)
    Rules(max_norm, examples, private).require_metrics(report.metrics)
    records = wire.records(reply.content, ArrayRecord)
    if set(records) != {wire.ARRAYS}:
        raise Refused(f"expected one array record '{wire.ARRAYS}', got {sorted(records)}")
    record = records[wire.ARRAYS]
    if record.keys() != model.keys():
        difference = ", ".join(sorted(record.keys() ^ model.keys())[:5])
        raise Refused(f"array names differ from the model's: {difference}")
    arrays = {name: _decode(name, record[name], model[name]) for name in model}
    if wire.CLIP_NORM in arrays and not _is_clip_norm(arrays[wire.CLIP_NORM]):
        raise Refused(BAD_CLIP_NORM)
    norm = update_norm(arrays, model)
    if not math.isfinite(norm):
        raise Refused(NOT_FINITE)
    if norm > max_norm:
        raise Refused(_too_far(norm, max_norm))
    return Update(report.num_examples, report.metrics, arrays, norm)


def _decode(name: str, array: Array, model: np.ndarray) -> np.ndarray:
    """The array's values, in place. Both headers, Flower's and NumPy's, must be the model's."""
    _check_header(name, array.shape, array.dtype, model)
    if len(array.data) > model.nbytes + wire.NPY_HEADER_BYTES:
        raise Refused(f"array '{name}' has {len(array.data)} bytes, the model's has {model.nbytes}")
    try:
        shape, dtype = wire.npy_header(array.data)
        _check_header(name, shape, str(dtype), model)
        return wire.view_array(array)
    except (ValueError, TypeError, OSError, EOFError) as error:
        raise Refused(f"array '{name}' can't be decoded: {error}") from None


def _check_header(name: str, shape: tuple[int, ...], dtype: str, model: np.ndarray) -> None:
    if tuple(shape) != model.shape:
        raise Refused(f"array '{name}' has shape {tuple(shape)}, the model has {model.shape}")
    if dtype != str(model.dtype):
        raise Refused(f"array '{name}' is {dtype}, the model's is {model.dtype}")


def _is_clip_norm(array: np.ndarray) -> bool:
    return bool(np.isfinite(array).all() and (array >= 0).all())


def _counts(name: str, array: np.ndarray) -> bool:
    """Whether an array is part of an update's distance: weights are, counters and the clip norm are not."""
    return np.issubdtype(array.dtype, np.floating) and name != wire.CLIP_NORM


def update_norm(arrays: Mapping[str, np.ndarray], model: Mapping[str, np.ndarray]) -> float:
    """L2 distance from the global model over floating-point arrays; NaN and infinity propagate."""
    total = 0.0
    with np.errstate(all="ignore"):
        for name, array in arrays.items():
            if _counts(name, array):
                total += _squared_distance(array.reshape(-1), model[name].reshape(-1))
    return math.sqrt(total) if total >= 0 else math.nan


def _squared_distance(one: np.ndarray, other: np.ndarray) -> float:
    total = 0.0
    for start in range(0, one.size, _CHUNK):
        part = slice(start, start + _CHUNK)
        delta = np.subtract(one[part], other[part], dtype=np.float64)
        total += float(np.dot(delta, delta))
    return total


def check_stack(
    stack: UpdateStack, expected: Sequence[Identity], model: Mapping[str, np.ndarray], rules: Rules
) -> tuple[list[str | None], list[float]]:
    """The same checks for every row of a stack: a reason to refuse it, or None; and the norms."""
    _check_stack_header(stack, model)
    rules.require_metrics(stack.metrics)
    norms = _stack_norms(stack.arrays, model)
    finite = {name: np.abs(values) <= LARGEST_METRIC for name, values in stack.metrics.items()}
    too_large = _rows_out_of_range(stack.arrays)
    reasons: list[str | None] = []
    for row, identity in enumerate(expected):
        reason = None
        if stack.identities[row] != identity:
            reason = f"wrong identity: {stack.identities[row]}, expected {identity}"
        elif not all(column[row] for column in finite.values()):
            reason = "a metric is not a reasonable number"
        elif stack.num_examples[row] not in rules.examples:
            reason = f"'{wire.NUM_EXAMPLES}' is {stack.num_examples[row]}"
        elif not math.isfinite(norms[row]):
            reason = NOT_FINITE
        elif norms[row] > rules.max_norm:
            reason = _too_far(norms[row], rules.max_norm)
        elif wire.CLIP_NORM in stack.arrays and not _is_clip_norm(stack.arrays[wire.CLIP_NORM][row]):
            reason = BAD_CLIP_NORM
        elif row in too_large:
            reason = f"update has a value outside ±2^{RANGE_BITS}"
        reasons.append(reason)
    return reasons, norms


def _check_stack_header(stack: UpdateStack, model: Mapping[str, np.ndarray]) -> None:
    """A stack is made by our own engine: one that doesn't fit is a bug, not a bad client."""
    for name, array in model.items():
        found = stack.arrays[name]
        if found.shape != (len(stack), *array.shape) or found.dtype != array.dtype:
            raise ValueError(
                f"stack of '{name}': {found.shape} {found.dtype} for a model of {array.shape} {array.dtype}"
            )


def _rows_out_of_range(stacks: Mapping[str, np.ndarray]) -> set[int]:
    """Rows that the fixed-point mean can't hold."""
    rows: set[int] = set()
    for stack in stacks.values():
        if np.issubdtype(stack.dtype, np.floating) and not peak(stack) < 2**RANGE_BITS:
            rows.update(row for row in range(len(stack)) if not peak(stack[row]) < 2**RANGE_BITS)
    return rows


def _stack_norms(stacks: Mapping[str, np.ndarray], model: Mapping[str, np.ndarray]) -> list[float]:
    total = np.zeros(len(next(iter(stacks.values()))))
    with np.errstate(all="ignore"):
        for name, stack in stacks.items():
            if _counts(name, stack):
                delta = np.subtract(stack, model[name]).reshape(len(stack), -1)
                total += np.einsum("ij,ij->i", delta, delta, dtype=np.float64)
        return [float(norm) for norm in np.sqrt(total)]
