"""Send messages and take replies one by one as they arrive, until a deadline.

Flower's `send_and_receive` returns when all replies are there; a server that takes them one by one can
reduce each at once and forget it. The map from message id to request is kept here: an error that Flower
makes up for a dead node carries the server's own node id.
"""

import time
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import TypeVar

from flwr.app import Message
from flwr.serverapp import Grid

from fedplat.errors import JobError
from fedplat.flower import error_reply
from fedplat.polling import Patience
from server_app.stack import DeliversStacks, KnowsItsFuture, UpdateStack

Arrival = TypeVar("Arrival", Message, Message | UpdateStack)
FIRST_POLL_S, LONGEST_POLL_S = 0.02, 1.0


class Exchange:
    """One round of messages. More can be sent while replies are being taken (a retry)."""

    def __init__(self, grid: Grid, deadline_s: float) -> None:
        self._grid = grid
        self._deadline = time.monotonic() + deadline_s
        self._pending: dict[str, Message] = {}
        self._unsent: list[Message] = []

    def send(self, messages: Iterable[Message]) -> None:
        requests = list(messages)
        ids = list(self._grid.push_messages(requests))
        if len(ids) != len(requests):
            raise JobError(f"the SuperLink took {len(ids)} of {len(requests)} messages: is the model too large for it?")
        for message_id, request in zip(ids, requests, strict=True):
            if message_id:
                self._pending[message_id] = request
            else:  # Flower gives no id to a message that it could not push
                self._unsent.append(request)

    def replies(self) -> Iterator[tuple[Message | None, Message]]:
        """(request, reply) pairs; the request is None for a reply that answers nothing still open."""
        yield from self._not_sent()
        for arrival in self._arrivals(self._grid.pull_messages):
            yield self._pending.pop(arrival.metadata.reply_to_message_id, None), arrival
            del arrival  # whoever got it may drop it before the next one is fetched

    def updates(self) -> Iterator[tuple[Message | None, Message] | tuple[list[Message], UpdateStack]]:
        """Like `replies`, but a Grid that computes many clients at once may hand over whole stacks."""
        if not isinstance(self._grid, DeliversStacks):
            yield from self.replies()
            return
        yield from self._not_sent()
        for arrival in self._arrivals(self._grid.pull_updates):
            if isinstance(arrival, UpdateStack):
                yield [self._pending.pop(message_id) for message_id in arrival.message_ids], arrival
            else:
                yield self._pending.pop(arrival.metadata.reply_to_message_id, None), arrival

    def _not_sent(self) -> Iterator[tuple[Message, Message]]:
        unsent, self._unsent = self._unsent, []
        for request in unsent:
            yield request, error_reply(request, "the message could not be sent")

    def _arrivals(self, pull: Callable[[Collection[str]], Iterable[Arrival]]) -> Iterator[Arrival]:
        patience = Patience(FIRST_POLL_S, LONGEST_POLL_S)
        while self._pending and not self.is_over():
            arrived = list(pull(self._pending.keys()))
            if self.is_over():
                return
            if arrived:
                while arrived:
                    yield arrived.pop(0)
                patience.restart()
            else:
                if isinstance(self._grid, KnowsItsFuture) and self._grid.nothing_to_come(self._pending.keys()):
                    return  # a simulated deadline need not be waited for
                time.sleep(patience.pause_s())

    def is_over(self) -> bool:
        return time.monotonic() >= self._deadline

    def missing(self) -> list[Message]:
        """Requests without a reply."""
        return list(self._pending.values())
