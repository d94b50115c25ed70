"""The request handler: the only trainer. ClientApp, LocalGrid and (later) the site agent all call it.

A request says which job, round and attempt it is about, and brings arrays. Everything else (data, optimiser, learning
rate, seeds) comes from the job and from the client's own name, so two requests with the same identity give the same
reply. Where a job's clients keep something between rounds (personal layers, control variates), that is the third
thing a reply depends on: it comes in and goes out as `memory`.

A private job's reply says nothing about the data but what its plan pays for: noisy (or clipped) arrays, an equal
weight, no loss, no number of examples, no duration. Its noise is drawn anew for every request.
"""

import time
from collections.abc import Sequence

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict

from client_app import memory as memories
from client_app.admission import admitted, sole_owner
from client_app.charges import Purpose
from client_app.client_level import clip_update
from client_app.dp_sgd import PrivateTrainer, Randomness, RandomnessSource
from client_app.local import Corrections, LocalResult, LocalTrainer
from client_app.private_model import require_private_model, require_separate_metrics
from client_app.released_metrics import release_metrics
from client_app.scaffold import ControlVariates
from client_app.schedule import learning_rate
from client_app.spending import admit_job, spending
from fedplat import wire
from fedplat.device import default_device, use_threads
from fedplat.errors import UsageError
from fedplat.evaluate import evaluate, example_values
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
from fedplat.task import Examples, rehearse
from fedplat.tasks import load_task
from fedplat.wire import EQUAL_WEIGHT, Identity
from privacy import plan_of
from privacy.clip_norm import require_clip_norm


class Handler:
    """Serves one job: its task, data and one resident model."""

    def __init__(self, job: Job, examples: Examples | None = None, owner: str | None = None) -> None:
        """`owner`: the client whose own data this site's files are (see `FederationData`)."""
        self.job, self.digest = job, job.digest
        self.task = load_task(job)
        self.data = FederationData(job, self.task, examples, owner)
        self.device = default_device()
        self.model = build_model(job, self.task).to(self.device)
        self.state = travelling_state(self.model, job.task.freeze, job.task.personal)
        # Buffers outside the state dict must not carry one client's data to the next, nor survive a resume.
        self._volatile = volatile_state(self.model)
        self._initial_volatile = read_arrays(self._volatile)
        self._personal = personal_state(self.model, job.task.personal)
        self._initial_personal = read_arrays(self._personal)
        self._controls = ControlVariates(self.model, self.state, job.is_scaffold)
        self.plan = plan_of(job)
        self._private, self._trainer = self._make_trainer()
        self._received: tuple[dict[str, bytes], dict[str, np.ndarray]] = ({}, {})

    def expected(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Dtype and shape of every array that a request must bring."""
        shapes = {name: (str(array.dtype), array.shape) for name, array in read_arrays(self.state).items()}
        shapes |= self._controls.expected()
        if self.plan is not None and self.plan.section.adaptive is not None:
            shapes[wire.CLIP_NORM] = ("float32", ())
        return shapes

    def _make_trainer(self) -> tuple[PrivateTrainer | None, LocalTrainer]:
        """The trainer of single examples' privacy where the job wants it, and the plain one."""
        job, plan, private = self.job, self.plan, None
        if plan is not None and plan.section.evaluation_noise is not None:
            require_separate_metrics(self.model, self.task, self.data.examples)
        if plan is not None and plan.section.unit == "sample":
            require_private_model(self.model, self.task, self.data.examples, job.task.freeze)
            private = PrivateTrainer(job, plan, self.task, self.model, self.device)
            self._randomness = RandomnessSource(plan, private.num_parameters)
        return private, LocalTrainer(job, self.task, self.model, self.device)

    def train(self, request: RecordDict, identity: Identity, memory: RecordDict | None = None) -> RecordDict:
        """Train on the client's examples and return the new arrays; `memory` takes what the client keeps."""
        job, client, number = self.job, identity.client, identity.round
        use_threads(job.local.threads)
        started = time.perf_counter()
        examples = self.data.train(client)
        memory = self._required(memory)
        remembered = memories.recall(memory, number)
        x, c, clip_norm = self.load(request, remembered)
        own = self._controls.own(remembered)
        lr = learning_rate(job, client, number)
        result, clip_norm = self.fit(examples, lr, identity, self._controls.corrections(c, own), clip_norm)
        y = read_arrays(self.state)
        renewed = self._controls.renewed(x, y, c, own, distance=result.steps * lr)
        if job.uses_client_state:
            memories.keep(memory, number, read_arrays(self._personal) | renewed)
        change = {name: renewed[name] - own[name] for name in own}
        metrics = {"steps": float(result.steps), "lr": lr}
        if self.plan is not None:
            if self._private is None:  # plain training takes as many steps as there are batches: that is a size
                del metrics["steps"]
            released = self._released(x, y, clip_norm)
            return wire.reply_content(identity, EQUAL_WEIGHT, metrics, wire.encode_arrays(released | change))
        metrics = {**result.metrics, **metrics, "seconds": time.perf_counter() - started}
        return wire.reply_content(identity, len(examples), metrics, wire.encode_arrays(y | change))

    def fit(
        self,
        examples: Examples,
        lr: float,
        identity: Identity,
        corrections: Corrections = (),
        clip_norm: float = 1.0,
    ) -> tuple[LocalResult, float]:
        """Train the resident model on these examples, as the job says; also the clip norm that was reached."""
        set_training(self.model, self.job.task.freeze)
        seed, labels = self.job.job.seed, (identity.client, identity.round)
        if self._private is None:
            with torch_seeded(seed, "torch", *labels):
                generator = torch_stream(seed, "train", *labels)
                return self._trainer.train(examples, lr, generator, corrections), clip_norm
        (randomness,) = self.randomness([identity])
        if not randomness.sampling.insecure:
            # Dropout and augmentation draw by an example's place in its batch, and one example more moves the others:
            # from a public seed the server could tell whose masks have changed.
            seed = int(randomness.sampling.words(1)[0])
        with torch_seeded(seed, "torch", *labels):
            generator = torch_stream(seed, "train", *labels)
            return self._private.train(examples, lr, generator, randomness, clip_norm, corrections)

    def randomness(self, identities: Sequence[Identity]) -> list[Randomness]:
        """Secret streams for these requests: see `RandomnessSource`."""
        return self._randomness.streams(self.job.job.seed, identities)

    def _released(self, x: Arrays, y: Arrays, clip_norm: float) -> Arrays:
        """What a private client sends: noisy parameters, or a clipped update; nothing that moved unnoticed."""
        assert self.plan is not None
        adaptive = self.plan.section.adaptive is not None
        if self._private is not None:
            trained = {name for name, p in self.model.named_parameters() if p.requires_grad}
            moved = [name for name in y if name not in trained and not np.array_equal(x[name], y[name])]
            if moved:
                raise UsageError(f"buffer '{moved[0]}' changed in private training: it would leave without noise")
            return y | ({wire.CLIP_NORM: np.array(clip_norm, np.float32)} if adaptive else {})
        clipped, below = clip_update(x, y, clip_norm)
        return clipped | ({wire.CLIP_NORM: np.array(float(below), np.float32)} if adaptive else {})

    def evaluate(self, request: RecordDict, identity: Identity, memory: RecordDict | None = None) -> RecordDict:
        """Measure the received model, with the client's own personal layers, on its held-out examples."""
        examples = self.data.holdout(identity.client)
        if len(examples) == 0 and self.plan is None:  # too few to hold any out: nothing to measure is no failure
            return wire.reply_content(identity, 0, {})
        self.load(request, memories.latest(self._required(memory)))
        if self.plan is not None:
            names = rehearse(self.task, self.job.task.name, self.data.examples)
            values = example_values(self.model, self.task, examples, self.device)
            noisy = release_metrics(self.plan, names, values, identity, self.job.job.seed)
            return wire.reply_content(identity, EQUAL_WEIGHT, noisy)
        measured = evaluate(self.model, self.task, examples, self.device)
        return wire.reply_content(identity, measured.num_examples, measured.metrics)

    def load(self, request: RecordDict, remembered: Arrays | None = None) -> tuple[Arrays, Arrays, float]:
        """Put the received model into the resident one, and the client's personal layers.

        Returns what was received: the model, control variates, and the clip norm (the job's own unless it adapts).
        """
        record = wire.records(request, ArrayRecord).get(wire.ARRAYS)
        if record is None:
            raise UsageError(f"request has no '{wire.ARRAYS}' record")
        model, controls = self._controls.split(self._decode(record))
        model, clip_norm = self._split_clip_norm(model)
        write_arrays(self.state, model)
        write_arrays(self._volatile, self._initial_volatile)
        personal = remembered or {}
        write_arrays(self._personal, {n: personal.get(n, start) for n, start in self._initial_personal.items()})
        return model, controls, clip_norm

    def _split_clip_norm(self, received: Arrays) -> tuple[Arrays, float]:
        if self.plan is None or self.plan.section.adaptive is None:
            return received, 1.0 if self.plan is None else self.plan.section.clip_norm
        if wire.CLIP_NORM not in received or received[wire.CLIP_NORM].size != 1:
            raise UsageError(f"request has no '{wire.CLIP_NORM}', and this job's clip norm adapts")
        model = {name: array for name, array in received.items() if name != wire.CLIP_NORM}
        return model, require_clip_norm(float(received[wire.CLIP_NORM]))

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


_warm: dict[tuple[str, str | None], Handler] = {}


def handler_for(canonical_job: str, owner: str | None = None) -> Handler:
    """The warm handler of a job and of whose data it reads: data and model are loaded once per process."""
    key = (canonical_job, owner)
    if key not in _warm:
        install_handler(canonical_job, Handler(Job.from_canonical(canonical_job), owner=owner), owner)
    return _warm[key]


def install_handler(canonical_job: str, handler: Handler, owner: str | None = None) -> None:
    """Make a handler the warm one; only the last two are kept, each holds a data set."""
    _warm[canonical_job, owner] = handler
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
    handler, identity = _admit(message, context, "train")
    size = _size(handler, identity.client)
    with spending(handler.job, handler.plan, identity, context, "train", size):
        content = handler.train(message.content, identity, context.state)
    return Message(content, reply_to=message)


def handle_evaluate(message: Message, context: Context) -> Message:
    handler, identity = _admit(message, context, "evaluate")
    size = _size(handler, identity.client)
    with spending(handler.job, handler.plan, identity, context, "evaluate", size):
        content = handler.evaluate(message.content, identity, context.state)
    return Message(content, reply_to=message)


def _size(handler: Handler, client: str) -> int:
    """All examples of a client, held out or not: a refusal must not depend on which ones a job's seed holds out."""
    rows = handler.data.rows(client)
    return len(rows.train) + len(rows.holdout)


def handle_admit(message: Message, context: Context) -> Message:
    """Pay for a whole job before anybody is sampled for it. A virtual client's spends are the simulation's business."""
    asked = Identity.of(message.content, wire.CONFIG)
    identity = Identity(asked.job, 0, asked.attempt, name_of(context))
    if not context.node_config.get(wire.SIMULATED):
        job = Job.from_canonical(run_job(context))
        _require_same_job(asked, job.digest)
        admit_job(job, identity)
    return Message(RecordDict({wire.IDENTITY: identity.record()}), reply_to=message)


def handle_hello(message: Message, context: Context) -> Message:
    """Tell the server this node's name, so that cohorts are sampled by name and not by node id."""
    content = RecordDict({wire.IDENTITY: ConfigRecord({"client": name_of(context)})})
    return Message(content, reply_to=message)


def _admit(message: Message, context: Context, purpose: Purpose) -> tuple[Handler, Identity]:
    """Refuse a job that this site did not agree to, and a request for another job than the one this run carries."""
    asked, carried = Identity.of(message.content, wire.CONFIG), run_job(context)
    identity = Identity(asked.job, asked.round, asked.attempt, name_of(context))
    if context.node_config.get(wire.SIMULATED):
        handler = handler_for(carried)
        _require_same_job(asked, handler.digest)
        return handler, identity
    job = Job.from_canonical(carried)
    _require_same_job(asked, job.digest)
    with admitted(job, identity, purpose):
        return handler_for(carried, sole_owner(job, identity.client)), identity


def _require_same_job(asked: Identity, carried: str) -> None:
    if asked.job != carried:
        raise UsageError("request is for another job than this run carries")
