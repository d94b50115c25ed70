"""Which engine computes a job's clients, and why: as the job says, or measured on the job itself."""

import time
from dataclasses import dataclass
from pathlib import Path

import torch
from flwr.clientapp import ClientApp

from client_app.handler import Handler, handler_for, install_handler
from client_app.schedule import learning_rate
from fedplat.device import use_threads
from fedplat.errors import UsageError
from fedplat.federation import client_name
from fedplat.job import Job
from fedplat.streams import torch_stream
from fedplat.wire import Identity
from simulations.engine import Engine, SerialEngine, examples_of
from simulations.faults import FaultyEngine, wants_crash
from simulations.process_engine import ProcessEngine, default_workers
from simulations.ray_engine import require_ray
from simulations.vector import ClientPlan, StackTrainer
from simulations.vector_engine import VectorEngine, default_chunk, stack_randomness, stack_trainer, why_not_vectorised
from simulations.worker import fedplat_client_app

CALIBRATION_CLIENTS = 3
WORTH_A_POOL_S = 3.0
"""Serial work below this is done before a pool of workers has started."""
WORTH_A_STACK = 8
"""Cohorts below this could be real sites: `auto` then gives the same model as `fedplat submit`, bit for bit."""


@dataclass(frozen=True)
class Choice:
    """An engine, and the one line that says why."""

    engine: str
    reason: str
    chunk: int = 0


def settle_engine(job: Job) -> tuple[Job, Choice]:
    """The job with its engine settled: a run that is resumed must not choose again, because bits depend on it."""
    handler = handler_for(job.canonical())
    choice = _choose(job, handler)
    settled = job.simulation.model_copy(update={"engine": choice.engine, "chunk": choice.chunk})
    pinned = job.model_copy(update={"simulation": settled})
    if pinned == job:  # settled before: the warm handler is this job's own
        return job, choice
    install_handler(pinned.canonical(), Handler(pinned, handler.data.examples))
    return pinned, choice


def make_engine(job: Job, client_app: ClientApp, ledger_file: Path | None = None) -> Engine:
    """The engine of a job whose engine is settled. A private job's clients are charged to the ledger of its run."""
    handler = handler_for(job.canonical())
    engine: Engine
    match job.simulation.engine:
        case "vector":
            engine = VectorEngine(job, client_app, job.simulation.chunk)
        case "process":
            engine = _process_engine(job, handler)
        case "serial":
            engine = SerialEngine(client_app)
        case other:
            raise ValueError(f"engine '{other}' is not settled, or not behind LocalGrid")
    faults = job.simulation.faults
    if any(faults.model_dump().values()):
        engine = FaultyEngine(engine, job, can_crash=job.simulation.engine == "process")
    plan = handler.plan
    if plan is not None and plan.section.unit == "sample":
        if ledger_file is None:
            raise ValueError("private clients need a ledger")
        from simulations.accounted_engine import AccountedEngine, open_simulation_ledger  # loads SQLAlchemy

        engine = AccountedEngine(engine, handler, plan, open_simulation_ledger(ledger_file, plan, handler.data.names()))
    return engine


def _process_engine(job: Job, handler: Handler) -> ProcessEngine:
    workers = job.simulation.workers or default_workers()
    cores = default_workers()
    if workers > 4 * cores:
        raise UsageError(
            f"simulation.workers = {workers} on {cores} cores would only take memory: use at most {4 * cores}"
        )

    return ProcessEngine(
        fedplat_client_app,
        workers,
        job=job.canonical(),
        examples=handler.data.examples,
        size_of=lambda delivery: examples_of(delivery, handler.data),
        crashes=lambda delivery: wants_crash(job, delivery),
    )


def _choose(job: Job, handler: Handler) -> Choice:
    asked = job.simulation.engine
    if asked == "serial":
        return Choice("serial", "asked for")
    if asked == "process":
        return Choice("process", "asked for")
    if asked == "ray":
        require_ray(job)
        return Choice("ray", "asked for: Flower's own simulation runtime")
    obstacle = why_not_vectorised(job, handler)
    if asked == "vector":
        if obstacle is None:
            return Choice("vector", "asked for", job.simulation.chunk or default_chunk(handler))
        return Choice("process", f"vector is not possible: {obstacle}")
    if obstacle is None and job.cohort.cohort_size < WORTH_A_STACK:
        obstacle = f"a cohort of {job.cohort.cohort_size} is computed one by one, with the bits of real sites"
    return _measured(job, handler, obstacle)


def _measured(job: Job, handler: Handler, obstacle: str | None) -> Choice:
    """Time a few clients one by one and one stack of them, and take the faster way."""
    use_threads(job.local.threads)
    serial_s = _time_serial(job, handler) / min(CALIBRATION_CLIENTS, job.cohort.clients)
    total_s = serial_s * job.cohort.cohort_size * job.job.rounds
    workers = job.simulation.workers or default_workers()
    best = Choice("serial", f"{serial_s * 1e3:.1f} ms per client, {total_s:.0f} s in all: a pool is not worth starting")
    pooled_s = serial_s / workers
    if obstacle is None:
        chunk = min(job.simulation.chunk or default_chunk(handler), job.cohort.cohort_size)
        stack_s = _time_stack(job, handler, chunk) / chunk
        if stack_s < pooled_s or (total_s < WORTH_A_POOL_S and stack_s < serial_s):
            reason = f"{stack_s * 1e3:.2f} ms per client in stacks of {chunk}, {serial_s * 1e3:.1f} ms one by one"
            return Choice("vector", reason, chunk)
        obstacle = f"stacks of {chunk} take {stack_s * 1e3:.1f} ms per client"
    if total_s >= WORTH_A_POOL_S and workers > 1:
        best = Choice("process", f"{workers} workers at {serial_s * 1e3:.1f} ms per client; {obstacle}")
    return best


def _plan(job: Job, handler: Handler, index: int) -> ClientPlan:
    client = client_name(index % job.cohort.clients)
    rows = torch.from_numpy(handler.data.rows(client).train)
    return ClientPlan(rows, learning_rate(job, client, 1), torch_stream(job.job.seed, "calibration", client))


def _time_serial(job: Job, handler: Handler) -> float:
    """Seconds for the calibration clients, one by one. The resident model's weights change; no request minds."""

    def train(index: int) -> None:
        name = client_name(index)
        handler.fit(handler.data.train(name), learning_rate(job, name, 1), Identity(job.digest, 0, 0, name))

    train(0)  # the first step in a process pays for lazy initialisation
    started = time.perf_counter()
    for index in range(min(CALIBRATION_CLIENTS, job.cohort.clients)):
        train(index)
    return time.perf_counter() - started


def _time_stack(job: Job, handler: Handler, chunk: int) -> float:
    trainer, randomness = stack_trainer(job, handler), stack_randomness(handler, chunk)

    def train(count: int) -> None:
        plans = [_plan(job, handler, i) for i in range(count)]
        if isinstance(trainer, StackTrainer):
            trainer.train(plans)
        else:
            identities = [Identity(job.digest, 0, 0, client_name(i)) for i in range(count)]
            trainer.train(plans, randomness(identities), clip_norm=1.0)

    train(min(2, chunk))
    started = time.perf_counter()
    train(chunk)
    return time.perf_counter() - started
