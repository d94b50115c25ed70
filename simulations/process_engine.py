"""The process engine: a pool of workers, longest client first, workers replaced when they die.

Workers are forked from this process, so a new one starts in milliseconds and shares what is loaded already; where CUDA
is in use they are spawned instead. The training data sits in shared memory; the global model is written there once per
round. A client whose worker died is tried once more on a fresh worker, then counted as failed.
"""

import logging
import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess, SpawnProcess

import torch
import torch.multiprocessing
from flwr.app import ArrayRecord, RecordDict
from flwr.clientapp import ClientApp

from fedplat.flower import error_reply
from fedplat.task import Examples
from server_app.stack import UpdateStack
from simulations.engine import Delivery, Done
from simulations.shared_model import ModelWriter
from simulations.worker import Assignment, Outcome, WorkerSetup, work

logger = logging.getLogger(__name__)
LAST_TRY = 2
POLL_S = 1.0
"""Longest wait of one `collect`: deadlines are checked in between."""
GROUPS_PER_WORKER = 4
"""A round is dealt in about this many groups per worker: few pipe round trips, still balanced at the end."""


@dataclass
class Worker:
    process: ForkProcess | SpawnProcess
    pipe: Connection
    assigned: dict[str, Delivery] = field(default_factory=dict)


class ProcessEngine:
    """Computes deliveries on worker processes."""

    def __init__(
        self,
        load_app: Callable[[], ClientApp],
        workers: int,
        *,
        job: str | None = None,
        examples: Examples | None = None,
        size_of: Callable[[Delivery], int] | None = None,
        crashes: Callable[[Delivery], bool] | None = None,
    ) -> None:
        self._load_app, self._job, self._examples = load_app, job, _shared(examples)
        self._size_of, self._crashes = size_of, crashes
        self._forks = not torch.cuda.is_available()
        self._context = multiprocessing.get_context("fork") if self._forks else multiprocessing.get_context("spawn")
        # One tracker for all: a worker with a tracker of its own would unlink the model's memory when it exits.
        resource_tracker.ensure_running()
        self._model = ModelWriter()
        self._queue: deque[Delivery] = deque()
        self._tries: dict[str, int] = {}
        self._failed: list[Done | UpdateStack] = []
        self._started = 0
        self._workers: list[Worker] = []
        for _ in range(workers):
            self._workers.append(self._start_worker())

    def submit(self, deliveries: Sequence[Delivery]) -> None:
        self._queue.extend(deliveries)
        if self._size_of is not None:
            self._queue = deque(sorted(self._queue, key=self._size_of, reverse=True))
        self._assign()

    def collect(self) -> list[Done | UpdateStack]:
        done, self._failed = self._failed, []
        if done or self.is_idle():
            return done
        busy = [worker for worker in self._workers if worker.assigned]
        ready = wait([worker.pipe for worker in busy], timeout=POLL_S)
        for worker in busy:
            if worker.pipe in ready:
                done += self._receive(worker)
        self._assign()
        return done + self._take_failed()

    def is_idle(self) -> bool:
        return not self._queue and not self._failed and not any(worker.assigned for worker in self._workers)

    def close(self) -> None:
        for worker in self._workers:
            worker.pipe.close()
        for worker in self._workers:
            worker.process.join(timeout=2)
            if worker.process.is_alive():
                worker.process.kill()
        self._workers.clear()
        self._model.close()

    # --- workers --------------------------------------------------------------------------------

    def _start_worker(self) -> Worker:
        here, there = self._context.Pipe()
        # A forked worker inherits these ends; it closes them, or it would never notice that its parent is gone.
        inherited = [here, *(worker.pipe for worker in self._workers)] if self._forks else []
        devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
        device = self._started % devices if devices else None
        setup = WorkerSetup(self._load_app, self._job, self._examples, device, run_id=1)
        process = self._context.Process(target=work, args=(there, setup, inherited), daemon=True)
        try:
            process.start()
        finally:
            there.close()
        self._started += 1
        return Worker(process, here)

    def _receive(self, worker: Worker) -> list[Done | UpdateStack]:
        """All outcomes that a worker has sent so far; none if it is dead."""
        done: list[Done | UpdateStack] = []
        try:
            while worker.assigned and worker.pipe.poll():
                outcome: Outcome = worker.pipe.recv()
                delivery = worker.assigned.pop(outcome.message_id)
                delivery.context.state = outcome.state
                self._tries.pop(outcome.message_id, None)
                done.append(Done(delivery, outcome.reply))
        except (EOFError, OSError):
            self._replace(worker)
        return done

    def _replace(self, dead: Worker) -> None:
        """Start another worker; the client it was on is tried again once, the rest were never started."""
        dead.process.join(timeout=2)
        code = dead.process.exitcode
        victim, *rest = dead.assigned.values()
        self._tries[victim.message_id] = self._tries.get(victim.message_id, 1) + 1
        logger.warning("a worker died (exit code %s); starting another", code)
        self._queue.extendleft(reversed(rest))
        if self._tries[victim.message_id] <= LAST_TRY:
            self._queue.appendleft(victim)
        else:
            reason = f"its worker died twice (exit code {code}): out of memory?"
            self._failed.append(Done(victim, error_reply(victim.message, reason)))
        dead.pipe.close()
        self._workers[self._workers.index(dead)] = self._start_worker()

    def _take_failed(self) -> list[Done | UpdateStack]:
        failed, self._failed = self._failed, []
        return failed

    # --- assignments ----------------------------------------------------------------------------

    def _assign(self) -> None:
        group = max(1, len(self._queue) // (GROUPS_PER_WORKER * max(1, len(self._workers))))
        for worker in self._workers:
            if self._queue and not worker.assigned:
                batch = [self._queue.popleft() for _ in range(min(group, len(self._queue)))]
                worker.assigned = {delivery.message_id: delivery for delivery in batch}
                try:
                    worker.pipe.send([self._assignment(delivery) for delivery in batch])
                except OSError:
                    self._replace(worker)

    def _assignment(self, delivery: Delivery) -> Assignment:
        content = delivery.message.content
        light = RecordDict({key: record for key, record in content.items() if not isinstance(record, ArrayRecord)})
        first_try = self._tries.get(delivery.message_id, 1) == 1
        return Assignment(
            delivery.message_id,
            delivery.message.metadata,
            light,
            self._model.place(content),
            delivery.context,
            crash=first_try and self._crashes is not None and self._crashes(delivery),
        )


def _shared(examples: Examples | None) -> Examples | None:
    """The data moved into shared memory: workers map it instead of copying it."""
    if examples is not None:
        examples.inputs.share_memory_()
        examples.targets.share_memory_()
    return examples


def default_workers() -> int:
    return os.cpu_count() or 1
