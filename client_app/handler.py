"""The request handler: the only trainer. ClientApp, LocalGrid and (later) the site agent all call it.

A request says which job, round and attempt it is about, and brings arrays. Everything else (data,
optimiser, learning rate, seeds) comes from the job and from the client's own name, so two
requests with the same identity give the same reply.
"""

import time
from functools import lru_cache

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict

from client_app.local import LocalTrainer
from client_app.schedule import learning_rate
from fedplat import wire
from fedplat.device import default_device
from fedplat.errors import UsageError
from fedplat.evaluate import evaluate
from fedplat.federation import FederationData, client_name
from fedplat.job import Job
from fedplat.model import build_model, read_arrays, set_training, travelling_state, write_arrays
from fedplat.streams import torch_seeded, torch_stream
from fedplat.tasks import load_task
from fedplat.wire import Identity


class Handler:
    """Serves one job: its task, data and one resident model."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.task = load_task(job)
        self.data = FederationData(job, self.task)
        self._device = default_device()
        self._model = build_model(job, self.task).to(self._device)
        self._state = travelling_state(self._model, job.task.freeze)
        self._trainer = LocalTrainer(job, self.task, self._model, self._device)
        self._received: tuple[dict[str, bytes], dict[str, np.ndarray]] = ({}, {})

    def train(self, request: RecordDict, identity: Identity) -> RecordDict:
        """Train on the client's examples and return the new arrays."""
        job, client, number = self.job, identity.client, identity.round
        if job.local.threads and torch.get_num_threads() != job.local.threads:
            torch.set_num_threads(job.local.threads)
        started = time.perf_counter()
        examples = self.data.train(client)
        self._load(request)
        set_training(self._model, job.task.freeze)
        lr = learning_rate(job, client, number)
        generator = torch_stream(job.job.seed, "train", client, number)
        with torch_seeded(job.job.seed, "torch", client, number):
            result = self._trainer.train(examples, lr, generator)
        metrics = {
            **result.metrics,
            "steps": float(result.steps),
            "lr": lr,
            "seconds": time.perf_counter() - started,
        }
        arrays = wire.encode_arrays(read_arrays(self._state))
        return wire.reply_content(identity, len(examples), metrics, arrays)

    def evaluate(self, request: RecordDict, identity: Identity) -> RecordDict:
        """Measure the received model on the client's held-out examples."""
        examples = self.data.holdout(identity.client)
        if len(examples) == 0:
            raise UsageError(f"{identity.client} has too few examples to hold any out: raise data.holdout")
        self._load(request)
        measured = evaluate(self._model, self.task, examples, self._device)
        return wire.reply_content(identity, measured.num_examples, measured.metrics)

    def _load(self, request: RecordDict) -> None:
        record = wire.records(request, ArrayRecord).get(wire.ARRAYS)
        if record is None:
            raise UsageError(f"request has no '{wire.ARRAYS}' record")
        write_arrays(self._state, self._decode(record))

    def _decode(self, record: ArrayRecord) -> dict[str, np.ndarray]:
        """Decode the global model once for all clients of this process that get the same bytes."""
        data = {name: array.data for name, array in record.items()}
        known, arrays = self._received
        if list(data) != list(known) or any(data[name] is not known[name] for name in data):
            arrays = wire.decode_arrays(record)
            self._received = (data, arrays)
        return arrays


@lru_cache(maxsize=2)
def handler_for(canonical_job: str) -> Handler:
    """The warm handler of a job: its data and model are loaded once per process."""
    return Handler(Job.from_canonical(canonical_job))


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
    return Message(handler.train(message.content, identity), reply_to=message)


def handle_evaluate(message: Message, context: Context) -> Message:
    handler, identity = _admit(message, context)
    return Message(handler.evaluate(message.content, identity), reply_to=message)


def handle_hello(message: Message, context: Context) -> Message:
    """Tell the server this node's name, so that cohorts are sampled by name and not by node id."""
    content = RecordDict({wire.IDENTITY: ConfigRecord({"client": name_of(context)})})
    return Message(content, reply_to=message)


def _admit(message: Message, context: Context) -> tuple[Handler, Identity]:
    """Refuse a request for another job than the one this run carries."""
    handler = handler_for(run_job(context))
    asked = Identity.of(message.content, wire.CONFIG)
    if asked.job != handler.job.digest:
        raise UsageError("request is for another job than this run carries")
    return handler, Identity(asked.job, asked.round, asked.attempt, name_of(context))
