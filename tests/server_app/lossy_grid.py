"""A Grid over real (virtual) clients that loses, delays, repeats and breaks messages as a test says."""

import itertools
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from flwr.app import Error, Message, RecordDict
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.run import Run

from fedplat.flower import stamp
from fedplat.packing import unpack
from simulations.local_grid import FIRST_NODE_ID, LocalGrid

Fate = Literal["fine", "lost", "reply lost", "late", "twice", "made-up error", "not taken"]
FATES: tuple[Fate, ...] = ("fine", "lost", "reply lost", "late", "twice", "made-up error")
NODE_UNAVAILABLE = 3
"""One of the codes for which Flower makes up a reply; 2 is the only one that a client causes itself."""


def always(*fates: Fate) -> Callable[[str], Fate]:
    """These fates one after the other for each site, then fine."""
    seen: dict[str, Iterable[Fate]] = {}

    def fate(site: str) -> Fate:
        queue = seen.setdefault(site, itertools.chain(fates, itertools.repeat("fine")))
        return next(iter(queue))

    return fate


def at_random(seed: int, bad: float = 0.6) -> Callable[[str], Fate]:
    rng = random.Random(seed)
    return lambda site: rng.choice(FATES) if rng.random() < bad else "fine"


@dataclass
class Sent:
    site: str
    request: Message
    fate: Fate
    message_id: str = ""


@dataclass
class LossyGrid(Grid):
    """`sites` names the nodes; `activated` is when each came up."""

    inner: LocalGrid
    sites: tuple[str, ...]
    fate: Callable[[str], Fate] = field(default_factory=always)
    error_code: int = NODE_UNAVAILABLE
    sent: list[Sent] = field(default_factory=list)
    activated: dict[str, str] = field(default_factory=dict)
    keys: dict[str, bytes] = field(default_factory=dict)
    away: set[str] = field(default_factory=set)
    pulls: int = 0
    one_at_a_time: bool = True
    """As our Grid to a SuperLink does; Flower's own hands over all that is there."""
    _ready: dict[str, Message] = field(default_factory=dict)
    _not_before: dict[str, int] = field(default_factory=dict)
    _again: dict[str, Message] = field(default_factory=dict)

    def set_run(self, run: Run) -> None:
        self.inner.set_run(run)

    @property
    def run(self) -> Run:
        return self.inner.run

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        return self.inner.create_message(content, message_type, dst_node_id, group_id, ttl)

    def get_node_ids(self) -> Iterable[int]:
        return [node.node_id for node in self.get_nodes()]

    def get_nodes(self) -> Iterable[NodeInfo]:
        return [
            NodeInfo(
                node_id=FIRST_NODE_ID + i,
                name=site,
                last_activated_at=self.activated.get(site, "2026-01-01"),
                public_key=self.keys.get(site, b""),
            )
            for i, site in enumerate(self.sites)
            if site not in self.away
        ]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        ids = []
        for message in messages:
            site = self.sites[message.metadata.dst_node_id - FIRST_NODE_ID]
            message.content = unpack(message.content)  # as a site's agent does, before it looks
            one = Sent(site, message, self.fate(site))
            self.sent.append(one)
            if one.fate == "not taken":
                ids.append("")
                continue
            if one.fate in ("lost", "made-up error"):
                one.message_id = stamp(message)
            else:
                (one.message_id,) = self.inner.push_messages([message])
            if one.fate == "made-up error":
                error = Message(Error(self.error_code, "Node Unavailable"), reply_to=message)
                stamp(error)
                self._ready[one.message_id] = error
            if one.fate == "late":
                self._not_before[one.message_id] = self.pulls + 20
            ids.append(one.message_id)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        self.pulls += 1
        self._collect()
        fates = {one.message_id: one.fate for one in self.sent}
        found: list[Message] = []
        single = False
        for message_id in message_ids:
            if single:
                break
            if message_id not in self._ready or self.pulls < self._not_before.get(message_id, 0):
                continue
            reply = self._ready.pop(message_id)
            if fates[message_id] == "reply lost":
                continue
            found.append(reply)
            single = self.one_at_a_time
            if fates[message_id] == "twice" and message_id not in self._again:
                self._again[message_id] = self._ready[message_id] = reply
        return found

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        raise NotImplementedError

    def _collect(self) -> None:
        pending = [one.message_id for one in self.sent if one.message_id]
        while not self.inner.nothing_to_come(pending):
            for reply in self.inner.pull_messages(pending):
                self._ready[reply.metadata.reply_to_message_id] = reply

    def times(self) -> Mapping[str, int]:
        return {site: sum(one.site == site for one in self.sent) for site in self.sites}
