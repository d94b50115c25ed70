"""Send messages and take replies one by one as they arrive, until a deadline.

Flower's `send_and_receive` returns when all replies are there; a server that takes them one by one can
reduce each at once and forget it. The map from message id to request is kept here: an error that Flower
makes up for a dead node carries the server's own node id.
"""

import time
from collections.abc import Iterable, Iterator

from flwr.app import Message
from flwr.serverapp import Grid

FIRST_POLL_S, LONGEST_POLL_S = 0.02, 1.0


class Exchange:
    """One round of messages. More can be sent while replies are being taken (a retry)."""

    def __init__(self, grid: Grid, deadline_s: float) -> None:
        self._grid = grid
        self._deadline = time.monotonic() + deadline_s
        self._pending: dict[str, Message] = {}

    def send(self, messages: Iterable[Message]) -> None:
        requests = list(messages)
        ids = self._grid.push_messages(requests)
        self._pending.update(zip(ids, requests, strict=True))

    def replies(self) -> Iterator[tuple[Message | None, Message]]:
        """(request, reply) pairs; the request is None for a reply that answers nothing still open."""
        poll_s = FIRST_POLL_S
        while self._pending and not self.is_over():
            arrived = list(self._grid.pull_messages(self._pending.keys()))
            if self.is_over():
                return
            for reply in arrived:
                yield self._pending.pop(reply.metadata.reply_to_message_id, None), reply
            poll_s = FIRST_POLL_S if arrived else min(2 * poll_s, LONGEST_POLL_S)
            if not arrived:
                time.sleep(poll_s)

    def is_over(self) -> bool:
        return time.monotonic() >= self._deadline

    def missing(self) -> list[Message]:
        """Requests without a reply."""
        return list(self._pending.values())
