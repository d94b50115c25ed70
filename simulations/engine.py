"""Engines: how virtual clients are computed. LocalGrid is the same over all of them.

`submit` takes deliveries, `collect` returns what is done (waiting a little if nothing is), in any order.
An engine never raises for a client's failure: that becomes an error reply, as in Flower.
"""

import traceback
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedplat.federation import FederationData
from fedplat.flower import error_reply, private_copy
from server_app.stack import UpdateStack


@dataclass(frozen=True)
class Delivery:
    """A message for one client, with the context it runs in (its node config and what it remembers)."""

    message: Message
    context: Context

    @property
    def message_id(self) -> str:
        return str(self.message.metadata.message_id)


@dataclass(frozen=True)
class Done:
    """One client's reply; the delivery's context holds what the client now remembers."""

    delivery: Delivery
    reply: Message


class Engine(Protocol):
    """Computes deliveries."""

    def submit(self, deliveries: Sequence[Delivery]) -> None: ...

    def collect(self) -> list[Done | UpdateStack]:
        """Something that is done, waiting a short while for it; empty if nothing is pending or ready."""
        ...

    def is_idle(self) -> bool:
        """Nothing is pending: what was not collected by now never comes."""
        ...

    def close(self) -> None: ...


def examples_of(delivery: Delivery, data: FederationData) -> int:
    """How many examples the delivery's client holds: how long it will take."""
    return len(data.parts[int(delivery.context.node_config["partition-id"])])


def run_client(client_app: ClientApp, delivery: Delivery) -> Done:
    """Run the ClientApp on one message; an exception becomes an error reply."""
    try:
        reply = client_app(private_copy(delivery.message), delivery.context)
    except Exception:
        reply = error_reply(delivery.message, traceback.format_exc())
    return Done(delivery, reply)


@runtime_checkable
class Accounted(Protocol):
    """An engine whose clients spend privacy, in a ledger that it keeps."""

    def most_releases(self) -> int: ...


class SerialEngine:
    """One client after another in this process: the reference that the others are measured against."""

    def __init__(self, client_app: ClientApp) -> None:
        self._client_app = client_app
        self._queue: deque[Delivery] = deque()

    def submit(self, deliveries: Sequence[Delivery]) -> None:
        self._queue.extend(deliveries)

    def collect(self) -> list[Done | UpdateStack]:
        return [run_client(self._client_app, self._queue.popleft())] if self._queue else []

    def is_idle(self) -> bool:
        return not self._queue

    def close(self) -> None:
        self._queue.clear()
