"""The request handler: the only trainer. ClientApp, LocalGrid and (later) the site agent all call it.

A request says which job, round and attempt it is about, and brings arrays. Everything else (data,
optimiser, learning rate, seeds) comes from the job and from the client's own name, so two
requests with the same identity give the same reply. Where a job's clients keep something between rounds (personal
layers, control variates), that is the third thing a reply depends on: it comes in and goes out as `memory`.
"""

import time

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict

from client_app import memory as memories
from client_app.local import LocalTrainer
from client_app.scaffold import ControlVariates
from client_app.schedule import learning_rate
from fedplat import wire
from fedplat.device import default_device, use_threads
from fedplat.errors import UsageError
from fedplat.evaluate import evaluate
from fedplat.federation import FederationData, client_name
from fedplat.job import Job
from fedplat.model import (
    Arrays,
    build_model,
    personal_state,
    read_arrays,
    set_training,
    travelling_state,
    volatile_state,
    write_arrays,
)
from fedplat.streams import torch_seeded, torch_stream
from fedplat.task import Examples
from fedplat.tasks import load_task
from fedplat.wire import Identity


class Handler:
    """Serves one job: its task, data and one resident model."""

    def __init__(self, job: Job, examples: Examples | None = None) -> None:
        self.job, self.digest = job, job.digest
        self.task = load_task(job)
        self.data = FederationData(job, self.task, examples)
        self.device = default_device()
        self.model = build_model(job, self.task).to(self.device)
        self.state = travelling_state(self.model, job.task.freeze, job.task.personal)
        # Buffers outside the state dict must not carry one client's data to the next, nor survive a resume.
        self._volatile = volatile_state(self.model)
        self._initial_volatile = read_arrays(self._volatile)
        self._personal = personal_state(self.model, job.task.personal)
        self._initial_personal = read_arrays(self._personal)
        self._controls = ControlVariates(self.model, self.state, job.is_scaffold)
        self._trainer = LocalTrainer(job, self.task, self.model, self.device)
        self._received: tuple[dict[str, bytes], dict[str, np.ndarray]] = ({}, {})

    def train(self, request: RecordDict, identity: Identity, memory: RecordDict | None = None) -> RecordDict:
        """Train on the client's examples and return the new arrays; `memory` takes what the client keeps."""
        job, client, number = self.job, identity.client, identity.round
        use_threads(job.local.threads)
        started = time.perf_counter()
        examples = self.data.train(client)
        memory = self._required(memory)
        remembered = memories.recall(memory, number)
        x, c = self.load(request, remembered)
        own = self._controls.own(remembered)
        set_training(self.model, job.task.freeze)
        lr = learning_rate(job, client, number)
        generator = torch_stream(job.job.seed, "train", client, number)
        with torch_seeded(job.job.seed, "torch", client, number):
            result = self._trainer.train(examples, lr, generator, self._controls.corrections(c, own))
        metrics = {
            **result.metrics,
            "steps": float(result.steps),
            "lr": lr,
            "seconds": time.perf_counter() - started,
        }
        y = read_arrays(self.state)
        renewed = self._controls.renewed(x, y, c, own, distance=result.steps * lr)
        if job.uses_client_state:
            memories.keep(memory, number, read_arrays(self._personal) | renewed)
        change = {name: renewed[name] - own[name] for name in own}
        return wire.reply_content(identity, len(examples), metrics, wire.encode_arrays(y | change))

    def evaluate(self, request: RecordDict, identity: Identity, memory: RecordDict | None = None) -> RecordDict:
        """Measure the received model, with the client's own personal layers, on its held-out examples."""
        examples = self.data.holdout(identity.client)
        if len(examples) == 0:  # too few to hold any out: nothing to measure is no failure
            return wire.reply_content(identity, 0, {})
        self.load(request, memories.latest(self._required(memory)))
        measured = evaluate(self.model, self.task, examples, self.device)
        return wire.reply_content(identity, measured.num_examples, measured.metrics)

    def load(self, request: RecordDict, remembered: Arrays | None = None) -> tuple[Arrays, Arrays]:
        """Put the received model into the resident one, and the client's personal layers; returns what was received."""
        record = wire.records(request, ArrayRecord).get(wire.ARRAYS)
        if record is None:
            raise UsageError(f"request has no '{wire.ARRAYS}' record")
        model, controls = self._controls.split(self._decode(record))
        write_arrays(self.state, model)
        write_arrays(self._volatile, self._initial_volatile)
        personal = remembered or {}
        write_arrays(self._personal, {n: personal.get(n, start) for n, start in self._initial_personal.items()})
        return model, controls

    def _required(self, memory: RecordDict | None) -> RecordDict:
        if memory is None and self.job.uses_client_state:
            raise UsageError("this job's clients keep state between rounds: give their Context.state")
        return memory if memory is not None else RecordDict()

    def _decode(self, record: ArrayRecord) -> dict[str, np.ndarray]:
        """Decode the global model once for all clients of this process that get the same bytes."""
        data = {name: array.data for name, array in record.items()}
        known, arrays = self._received
        if list(data) != list(known) or any(data[name] is not known[name] for name in data):
            arrays = wire.decode_arrays(record)
            self._received = (data, arrays)
        return arrays


_warm: dict[str, Handler] = {}


def handler_for(canonical_job: str) -> Handler:
    """The warm handler of a job: its data and model are loaded once per process."""
    if canonical_job not in _warm:
        install_handler(canonical_job, Handler(Job.from_canonical(canonical_job)))
    return _warm[canonical_job]


def install_handler(canonical_job: str, handler: Handler) -> None:
    """Make a handler the warm one; only the last two are kept, each holds a data set."""
    _warm[canonical_job] = handler
    for old in list(_warm)[:-2]:
        del _warm[old]


def run_job(context: Context) -> str:
    """The job that travels with a Flower run."""
    return str(context.run_config.get(wire.JOB_KEY, ""))


def name_of(context: Context) -> str:
    """The client's name: what its node is called, else what its partition number makes it."""
    if "name" in context.node_config:
        return str(context.node_config["name"])
    if "partition-id" in context.node_config:
        return client_name(int(context.node_config["partition-id"]))
    raise UsageError("this node has no name: start it with --node-config 'partition-id=0' (or 'name=\"client-0\"')")


def handle_train(message: Message, context: Context) -> Message:
    handler, identity = _admit(message, context)
    return Message(handler.train(message.content, identity, context.state), reply_to=message)


def handle_evaluate(message: Message, context: Context) -> Message:
    handler, identity = _admit(message, context)
    return Message(handler.evaluate(message.content, identity, context.state), reply_to=message)


def handle_hello(message: Message, context: Context) -> Message:
    """Tell the server this node's name, so that cohorts are sampled by name and not by node id."""
    content = RecordDict({wire.IDENTITY: ConfigRecord({"client": name_of(context)})})
    return Message(content, reply_to=message)


def _admit(message: Message, context: Context) -> tuple[Handler, Identity]:
    """Refuse a request for another job than the one this run carries."""
    handler = handler_for(run_job(context))
    asked = Identity.of(message.content, wire.CONFIG)
    if asked.job != handler.digest:
        raise UsageError("request is for another job than this run carries")
    return handler, Identity(asked.job, asked.round, asked.attempt, name_of(context))
