"""Faults on purpose: an engine around an engine that lets clients fail, vanish, be late, send NaN, or crash.

Which client fails in which round and attempt is drawn from the job's seed, so a run with faults repeats. Simulated
lateness needs no waiting: the reply is simply never delivered, and the Grid says that nothing more will come.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
from flwr.app import Array, ArrayRecord

from client_app.handler import name_of
from fedplat import wire
from fedplat.flower import error_reply
from fedplat.job import Job
from fedplat.streams import numpy_stream
from fedplat.wire import Identity
from server_app.stack import UpdateStack
from simulations.engine import Delivery, Done, Engine

Fault = Literal["fail", "drop", "late", "nan", "crash"]
FAULTS: tuple[Fault, ...] = ("fail", "drop", "late", "nan", "crash")


def fault_of(job: Job, delivery: Delivery) -> Fault | None:
    """The fault that strikes this request, if any. Only training requests are struck."""
    if delivery.message.metadata.message_type != "train":
        return None
    asked = Identity.of(delivery.message.content, wire.CONFIG)
    draw = numpy_stream(job.job.seed, "fault", name_of(delivery.context), asked.round, asked.attempt).random()
    for fault in FAULTS:
        draw -= getattr(job.simulation.faults, fault)
        if draw < 0:
            return fault
    return None


def wants_crash(job: Job, delivery: Delivery) -> bool:
    return job.simulation.faults.crash > 0 and fault_of(job, delivery) == "crash"


class FaultyEngine:
    """Strikes deliveries on their way in, and updates on their way out."""

    def __init__(self, engine: Engine, job: Job, *, can_crash: bool) -> None:
        self._engine, self._job, self._can_crash = engine, job, can_crash
        self._struck: list[Done | UpdateStack] = []
        self._poisoned: set[str] = set()

    def submit(self, deliveries: Sequence[Delivery]) -> None:
        passed = []
        for delivery in deliveries:
            fault = fault_of(self._job, delivery)
            if fault == "fail" or (fault == "crash" and not self._can_crash):
                self._struck.append(Done(delivery, error_reply(delivery.message, f"injected fault: {fault}")))
            elif fault not in ("drop", "late"):
                passed.append(delivery)
            if fault == "nan":
                self._poisoned.add(delivery.message_id)
        self._engine.submit(passed)

    def collect(self) -> list[Done | UpdateStack]:
        struck, self._struck = self._struck, []
        return struck or [self._poison(result) for result in self._engine.collect()]

    def is_idle(self) -> bool:
        return not self._struck and self._engine.is_idle()

    def close(self) -> None:
        self._engine.close()

    def _poison(self, result: Done | UpdateStack) -> Done | UpdateStack:
        if isinstance(result, UpdateStack):
            rows = [row for row, message_id in enumerate(result.message_ids) if message_id in self._poisoned]
            return replace(result, arrays={n: _with_nan(a, rows) for n, a in result.arrays.items()}) if rows else result
        if result.delivery.message_id in self._poisoned and result.reply.has_content():
            for record in wire.records(result.reply.content, ArrayRecord).values():
                for name, array in list(record.items()):
                    record[name] = Array(_with_nan(array.numpy(), None))
        return result


def _with_nan(array: np.ndarray, rows: list[int] | None) -> np.ndarray:
    """A copy with these rows (None: all of it) turned into NaN; integers can't be."""
    poisoned = np.array(array)
    if np.issubdtype(poisoned.dtype, np.floating):
        poisoned[slice(None) if rows is None else rows] = np.nan
    return poisoned
