"""The vector engine: the training requests of a round, a chunk of clients at a time.

What can't be stacked is refused by `why_not_vectorised` with a reason, and runs on another engine. Evaluation and
queries run one by one: they are rare and cheap.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from flwr.app import RecordDict
from flwr.clientapp import ClientApp
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from client_app.client_level import clip_update
from client_app.dp_sgd import Randomness, RandomnessSource
from client_app.handler import Handler, handler_for, name_of
from client_app.schedule import learning_rate
from fedplat import wire
from fedplat.device import use_threads
from fedplat.job import Job
from fedplat.model import Arrays, set_training
from fedplat.streams import torch_stream
from fedplat.wire import Identity
from server_app.stack import UpdateStack
from simulations.engine import Delivery, Done, examples_of, run_client
from simulations.private_vector import MOST_ELEMENTS, PrivateStackTrainer
from simulations.stacked_mlp import is_plain_mlp, layers_of
from simulations.vector import ClientPlan, StackResult, StackTrainer, stacked_forward

logger = logging.getLogger(__name__)
CACHE_BYTES = 8 << 20
"""Stacked parameters and gradients of one chunk should stay in a core's share of the cache."""


def why_not_vectorised(job: Job, handler: Handler) -> str | None:
    """The reason why this job's clients can't be stacked, or None."""
    model = handler.model
    if job.uses_client_state:
        return "clients keep state between rounds"
    if job.local.precision != "fp32":
        return f"local.precision = '{job.local.precision}' needs its own loss scale per client"
    if job.local.seconds is not None:
        return "local.seconds: a time limit has no meaning for clients that run together"
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm | _NormBase) and module.track_running_stats:
            return f"layer '{name}' ({type(module).__name__}) keeps statistics of its batches"
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            return f"layer '{name}' ({type(module).__name__}) draws from the global random stream"
    if handler.device.type != "cpu":
        return "a GPU runs clients through the process engine"
    return _why_forward_differs(handler) or _why_too_large(handler)


def _why_too_large(handler: Handler) -> str | None:
    """Per-example gradients of a stack must fit into memory where they are formed at all."""
    plan = handler.plan
    if plan is None or plan.section.unit == "client" or is_plain_mlp(layers_of(handler.model)):
        return None
    parameters = sum(p.numel() for p in handler.model.parameters() if p.requires_grad)
    elements = int(parameters * 2 * plan.normaliser) * default_chunk(handler)
    return f"per-example gradients of a stack would take {elements * 4 >> 20} MB" if elements > MOST_ELEMENTS else None


@torch.no_grad()
def _why_forward_differs(handler: Handler) -> str | None:
    """Run two examples both ways: catches data-dependent control flow and anything else that vmap can't do."""
    model, inputs = handler.model, handler.data.examples.inputs[:2]
    set_training(model, handler.job.task.freeze)
    parameters = {name: p.detach().expand(2, *p.shape) for name, p in model.named_parameters() if p.requires_grad}
    try:
        stacked = stacked_forward(model)(parameters, torch.stack([inputs, inputs.flip(0)]))
        flat, _ = torch.utils._pytree.tree_flatten(stacked)
        plain, _ = torch.utils._pytree.tree_flatten(model(inputs))
    except Exception as error:
        return f"the model can't be vectorised ({type(error).__name__}: {str(error).splitlines()[0]})"
    agree = all(torch.allclose(a[0], b, atol=1e-4) and torch.allclose(a[1], b.flip(0), atol=1e-4)
                for a, b in zip(flat, plain, strict=True))  # fmt: skip
    return None if agree else "the model gives other outputs when vectorised"


def default_chunk(handler: Handler) -> int:
    """As many clients as fit the cache with parameters and gradients, between 8 and 128."""
    size = sum(p.numel() * p.element_size() for p in handler.model.parameters() if p.requires_grad)
    return int(min(128, max(8, CACHE_BYTES // (2 * size))))


def stack_trainer(job: Job, handler: Handler) -> StackTrainer | PrivateStackTrainer:
    """What trains stacks of this job's clients."""
    if handler.plan is not None and handler.plan.section.unit == "sample":
        return PrivateStackTrainer(job, handler.plan, handler.task, handler.model, handler.data.examples)
    return StackTrainer(job, handler.task, handler.model, handler.data.examples)


def stack_randomness(handler: Handler, chunk: int) -> Callable[[Sequence[Identity]], list[Randomness]]:
    """Secret streams for stacks of so many clients."""
    plan = handler.plan
    if plan is None:
        return lambda identities: []
    parameters = sum(p.numel() for p in handler.model.parameters() if p.requires_grad)
    return partial(RandomnessSource(plan, chunk * parameters).streams, handler.job.job.seed)


class VectorEngine:
    """Trains chunks of clients at once in this process."""

    def __init__(self, job: Job, client_app: ClientApp, chunk: int = 0) -> None:
        self._job, self._client_app = job, client_app
        self._handler = handler_for(job.canonical())
        self._privacy = self._handler.plan
        self._trainer = stack_trainer(job, self._handler)
        self.chunk = chunk or default_chunk(self._handler)
        self._randomness = stack_randomness(self._handler, self.chunk)
        self._train: deque[Delivery] = deque()
        self._others: deque[Delivery] = deque()
        self._asked = (RecordDict(), Identity("", 0, 0))

    def submit(self, deliveries: Sequence[Delivery]) -> None:
        for delivery in deliveries:
            is_train = delivery.message.metadata.message_type == "train"
            (self._train if is_train else self._others).append(delivery)
        # Neighbours in a chunk should have about the same amount of work: less padding, fewer idle rows.
        self._train = deque(sorted(self._train, key=lambda delivery: examples_of(delivery, self._handler.data)))

    def collect(self) -> list[Done | UpdateStack]:
        if self._others:
            return [run_client(self._client_app, self._others.popleft())]
        if not self._train:
            return []
        use_threads(self._job.local.threads)
        chunk = [self._train.popleft() for _ in range(min(self.chunk, len(self._train)))]
        try:
            return [self._train_chunk(chunk)]
        except Exception as error:  # one by one, each client's failure becomes its own error reply
            if len(chunk) == 1 or "memory" not in str(error).lower():
                return [run_client(self._client_app, delivery) for delivery in chunk]
            self.chunk = max(1, len(chunk) // 2)
            logger.warning("not enough memory for %d clients at once: going on with %d", len(chunk), self.chunk)
            self._train.extendleft(reversed(chunk))
            return self.collect()

    def is_idle(self) -> bool:
        return not self._train and not self._others

    def close(self) -> None:
        self._train.clear()
        self._others.clear()

    def _train_chunk(self, chunk: list[Delivery]) -> UpdateStack:
        started = time.perf_counter()
        identities = [self._identity(delivery) for delivery in chunk]
        received, _, clip_norm = self._handler.load(chunk[0].message.content)
        randomness = self._randomness(identities) if isinstance(self._trainer, PrivateStackTrainer) else []
        seeds = self._seeds(randomness, len(chunk))
        plans = [self._plan(identity, seed) for identity, seed in zip(identities, seeds, strict=True)]
        result, clip_norms = self._trained(plans, randomness, clip_norm)
        arrays = {name: self._rows_of(name, result.parameters, len(chunk)) for name in self._handler.state}
        metrics = {"steps": np.array(result.steps, np.float64), "lr": np.array([plan.lr for plan in plans])}
        if self._privacy is not None:
            weights = [wire.EQUAL_WEIGHT] * len(chunk)
            if self._privacy.section.unit == "client":
                del metrics["steps"]
            arrays = self._released(received, arrays, clip_norm, clip_norms)
        else:
            weights = [len(plan.rows) for plan in plans]
            metrics |= {name: values.numpy() for name, values in result.metrics.items()}
            metrics["seconds"] = np.full(len(chunk), (time.perf_counter() - started) / len(chunk))
        return UpdateStack(
            message_ids=[delivery.message_id for delivery in chunk],
            identities=identities,
            num_examples=weights,
            metrics=metrics,
            arrays=arrays,
        )

    def _trained(
        self, plans: list[ClientPlan], randomness: list[Randomness], clip_norm: float
    ) -> tuple[StackResult, list[float]]:
        if isinstance(self._trainer, StackTrainer):
            return self._trainer.train(plans), []
        return self._trainer.train(plans, randomness, clip_norm)

    def _seeds(self, randomness: list[Randomness], clients: int) -> list[int]:
        """What each client's augmentation is drawn from: a secret where the job is private, as in `Handler.fit`."""
        if not randomness or randomness[0].sampling.insecure:
            return [self._job.job.seed] * clients
        return [int(word) for word in randomness[0].sampling.words(clients)]

    def _released(self, received: Arrays, arrays: Arrays, clip_norm: float, clip_norms: list[float]) -> Arrays:
        """What private clients send: see `Handler._released`, which does this for one of them."""
        assert self._privacy is not None
        marks = np.array(clip_norms, np.float32)
        if self._privacy.section.unit == "client":
            rows = [
                {name: array[row] for name, array in arrays.items()} for row in range(len(arrays[next(iter(arrays))]))
            ]
            clipped = [clip_update(received, row, clip_norm) for row in rows]
            arrays = {name: np.stack([sent[name] for sent, _ in clipped]) for name in arrays}
            marks = np.array([float(below) for _, below in clipped], np.float32)
        return arrays | ({wire.CLIP_NORM: marks} if self._privacy.section.adaptive is not None else {})

    def _rows_of(self, name: str, parameters: dict[str, torch.Tensor], count: int) -> np.ndarray:
        """The trained rows of a parameter; a buffer travels back as it came."""
        if name in parameters:
            return parameters[name].numpy()
        constant = self._handler.state[name].detach().numpy()
        return np.broadcast_to(constant, (count, *constant.shape))

    def _identity(self, delivery: Delivery) -> Identity:
        content: RecordDict = delivery.message.content
        if content is not self._asked[0]:  # a strategy sends one content to the whole cohort
            self._asked = (content, Identity.of(content, wire.CONFIG))
        return replace(self._asked[1], client=name_of(delivery.context))

    def _plan(self, identity: Identity, seed: int) -> ClientPlan:
        job, client, number = self._job, identity.client, identity.round
        return ClientPlan(
            rows=torch.from_numpy(self._handler.data.rows(client).train),
            lr=learning_rate(job, client, number),
            generator=torch_stream(seed, "train", client, number),
        )
