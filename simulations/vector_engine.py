"""The vector engine: the training requests of a round, a chunk of clients at a time.

What can't be stacked is refused by `why_not_vectorised` with a reason, and runs on another engine. Evaluation and
queries run one by one: they are rare and cheap.
"""

import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from flwr.app import RecordDict
from flwr.clientapp import ClientApp
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from client_app.handler import Handler, handler_for, name_of
from client_app.schedule import learning_rate
from fedplat import wire
from fedplat.device import use_threads
from fedplat.job import Job
from fedplat.model import set_training
from fedplat.streams import torch_stream
from fedplat.wire import Identity
from server_app.stack import UpdateStack
from simulations.engine import Delivery, Done, examples_of, run_client
from simulations.vector import ClientPlan, StackTrainer, stacked_forward

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
    return _why_forward_differs(handler)


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


class VectorEngine:
    """Trains chunks of clients at once in this process."""

    def __init__(self, job: Job, client_app: ClientApp, chunk: int = 0) -> None:
        self._job, self._client_app = job, client_app
        self._handler = handler_for(job.canonical())
        self._trainer = StackTrainer(job, self._handler.task, self._handler.model, self._handler.data.examples)
        self.chunk = chunk or default_chunk(self._handler)
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
        except (MemoryError, RuntimeError) as error:
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
        self._handler.load(chunk[0].message.content)
        plans = [self._plan(identity) for identity in identities]
        result = self._trainer.train(plans)
        seconds = (time.perf_counter() - started) / len(chunk)
        metrics = {name: values.numpy() for name, values in result.metrics.items()}
        metrics["steps"] = np.array(result.steps, np.float64)
        metrics["lr"] = np.array([plan.lr for plan in plans])
        metrics["seconds"] = np.full(len(chunk), seconds)
        return UpdateStack(
            message_ids=[delivery.message_id for delivery in chunk],
            identities=identities,
            num_examples=[len(plan.rows) for plan in plans],
            metrics=metrics,
            arrays={name: self._rows_of(name, result.parameters, len(chunk)) for name in self._handler.state},
        )

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

    def _plan(self, identity: Identity) -> ClientPlan:
        job, client, number = self._job, identity.client, identity.round
        return ClientPlan(
            rows=torch.from_numpy(self._handler.data.rows(client).train),
            lr=learning_rate(job, client, number),
            generator=torch_stream(job.job.seed, "train", client, number),
        )
