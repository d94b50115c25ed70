"""A Grid that wraps Flower's own for real sites: it keeps asking, and it carries what sites say of their ledgers.

A message to a real site can be lost in more ways than Flower reports: a SuperNode that is killed forgets what it was
given, and one that was away for a minute gets an error made up for it while its own reply is thrown away. A site
answers the same request with the same bytes, free of charge, so this Grid sends again: at once when a node has
restarted, after a while when nothing is heard, until whoever waits gives up.

Strategies and driver see plain requests and replies: statements (`privacy.ledger_heads`) are added and taken off here,
and contents are packed for the way (`fedplat.packing`).
"""

import contextlib
import json
import logging
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.run import Run

from fedplat import wire
from fedplat.consortium.roster_file import RosterFile
from fedplat.federation import client_name
from fedplat.files import write_file
from fedplat.flower import CLIENT_RAISED, node_key, now_answers, unusable_reply
from fedplat.job import Job
from fedplat.packing import pack, unpack
from privacy.ledger_heads import Statement, parse_statement

logger = logging.getLogger(__name__)
SEND_AGAIN_S = 30.0
SOON_S = 2.0
NODES_EVERY_S = 2.0


class StatementStore:
    """The newest genuine statement of each site, kept over runs and restarts."""

    def __init__(self, path: Path, roster: RosterFile) -> None:
        self._path, self.roster = path, roster
        self.newest: dict[str, Statement] = {}
        with contextlib.suppress(OSError, ValueError):
            for text in json.loads(path.read_text(encoding="utf-8")):
                self._hear(text)

    def take(self, content: RecordDict, site: str) -> None:
        """Take a reply's statement off it. A site speaks for itself only."""
        record = content.pop(wire.SITE, None)
        try:
            news = isinstance(record, ConfigRecord) and self._hear(str(record.get("statement", "")), site)
        except Exception as error:  # whatever it is that a site says there, its update is judged by itself
            logger.warning("site %s: its statement can't be read: %s", site, type(error).__name__)
            return
        if news:
            stored = [statement.model_dump_json() for statement in self.newest.values()]
            write_file(self._path, json.dumps(stored).encode(), mode=0o600)

    def _hear(self, text: str, site: str | None = None) -> bool:
        statement = parse_statement(text)
        if statement is None or site not in (None, statement.site) or not statement.is_genuine(self.roster.current):
            return False
        known = self.newest.get(statement.site)
        if known is not None and known.time >= statement.time:
            return False
        self.newest[statement.site] = statement
        return True

    def budgets(self) -> dict[str, dict[str, float]]:
        """ε that is left, of the sites that show it."""
        return {name: said.budget for name, said in self.newest.items() if said.budget is not None}

    def record(self) -> ConfigRecord:
        """What goes along with every request."""
        statements = [self.newest[name].model_dump_json() for name in sorted(self.newest)]
        return ConfigRecord({"statements": statements, "roster": self.roster.text()})


@dataclass
class _Asked:
    """One request, however often it was sent."""

    request: Message
    first: str = ""
    """The id of its first sending: what it is known by."""
    ids: list[str] = field(default_factory=list)
    """Sendings that may still be answered."""
    times: int = 0
    activated: str = ""
    """When the node had come up, as far as was known at the last sending."""
    again_at: float = 0.0


class SiteGrid(Grid):
    """The sites of one job, each under the client name that the job gives it."""

    def __init__(self, grid: Grid, job: Job, statements: StatementStore) -> None:
        self._grid, self._statements = grid, statements
        self._names = {site: client_name(number) for number, site in enumerate(job.cohort.sites)}
        self._asked: dict[str, _Asked] = {}
        self._keys = {name: node_key(entry.node) for name, entry in statements.roster.current.sites.items()}
        self._nodes: dict[int, NodeInfo] = {}
        self._seen: dict[int, float] = {}
        self._nodes_at = 0.0
        self._patience_s = job.cohort.deadline_s

    # --- Flower's Grid --------------------------------------------------------------------------

    def set_run(self, run: Run) -> None:
        self._grid.set_run(run)

    @property
    def run(self) -> Run:
        return self._grid.run

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        return self._grid.create_message(content, message_type, dst_node_id, group_id, ttl)

    def get_node_ids(self) -> Iterable[int]:
        return [node.node_id for node in self.get_nodes()]

    def get_nodes(self) -> Iterable[NodeInfo]:
        """The job's sites under their client names: those that are connected, or were within a round's deadline.

        A site that is away for a moment is asked all the same, until the deadline. Names are the SuperLink's; whose
        node it is, its key says.
        """
        self._nodes_at = now = time.monotonic()
        for node in self._grid.get_nodes():
            if node.name in self._names and node.public_key == self._keys.get(node.name):
                self._nodes[node.node_id], self._seen[node.node_id] = node, now
        lost = [node for node, seen in self._seen.items() if now - seen > self._patience_s]
        for node_id in lost:
            del self._seen[node_id], self._nodes[node_id]
        named = []
        for node in self._nodes.values():
            copy = NodeInfo()
            copy.CopyFrom(node)
            copy.name = self._names[node.name]
            named.append(copy)
        return named

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send requests. The id that is returned stays valid however often a request is sent again."""
        requests = list(messages)
        self._forget({request.metadata.dst_node_id for request in requests})
        asked = [_Asked(request) for request in requests]
        self._send(asked)
        self._asked |= {one.first: one for one in asked if one.first}
        return [one.first for one in asked]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """The replies that are there. Sends again what seems lost."""
        wanted = {message_id: self._asked[message_id] for message_id in message_ids if message_id in self._asked}
        self._send_again(wanted.values())
        sent = {message_id: asked for asked in wanted.values() for message_id in asked.ids}
        answers = []
        for reply in self._grid.pull_messages(list(sent)):
            asked = sent[reply.metadata.reply_to_message_id]
            if asked.first not in self._asked:  # two sendings of one request were answered
                continue
            answer = self._answer(asked, reply)
            if answer is not None:
                self._asked.pop(asked.first, None)
                now_answers(answer, asked.first)
                answers.append(answer)
            else:
                asked.ids.remove(reply.metadata.reply_to_message_id)
                asked.again_at = min(asked.again_at, time.monotonic() + SOON_S)
        return answers

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        pending = set(self.push_messages(messages))
        deadline = time.monotonic() + (timeout if timeout is not None else 3600.0)
        replies: list[Message] = []
        while pending and time.monotonic() < deadline:
            arrived = list(self.pull_messages(pending))
            pending -= {reply.metadata.reply_to_message_id for reply in arrived}
            replies += arrived
            if not arrived:
                time.sleep(0.1)
        return replies

    # --- what a real site keeps by itself -------------------------------------------------------

    def client_states(self) -> Mapping[str, RecordDict]:
        """Sites keep their own state (`client_app/site_memory.py`): nothing is checkpointed here."""
        return {}

    def restore_client_states(self, states: Mapping[str, RecordDict]) -> None:
        return None

    # --- sending --------------------------------------------------------------------------------

    def _forget(self, nodes: Collection[int]) -> None:
        """A node that is asked anew owes no answer to what it was asked before."""
        old = [first for first, one in self._asked.items() if one.request.metadata.dst_node_id in nodes]
        for first in old:
            del self._asked[first]

    def _send(self, asked: Iterable[_Asked]) -> None:
        peers, due = self._statements.record(), list(asked)
        copies: dict[int, RecordDict] = {}
        messages = []
        for one in due:
            request = one.request
            content = copies.get(id(request.content))
            if content is None:  # one content for the whole cohort, as the strategy made it
                content = copies[id(request.content)] = pack(RecordDict({**request.content, wire.PEERS: peers}))
            metadata = request.metadata
            messages.append(Message(content, dst_node_id=metadata.dst_node_id, message_type=metadata.message_type))
        ids = list(self._grid.push_messages(messages)) or [""] * len(messages)
        for one, message_id in zip(due, ids, strict=True):
            if message_id:  # Flower gives none to a message that it could not push
                one.ids.append(message_id)
                one.first = one.first or message_id
            one.times += 1
            one.again_at = time.monotonic() + SEND_AGAIN_S * one.times
            node = self._nodes.get(one.request.metadata.dst_node_id)
            one.activated = node.last_activated_at if node is not None else ""

    def _send_again(self, asked: Iterable[_Asked]) -> None:
        now = time.monotonic()
        if now - self._nodes_at > NODES_EVERY_S:
            self.get_nodes()
        due = []
        for one in asked:
            node = self._nodes.get(one.request.metadata.dst_node_id)
            restarted = node is not None and node.last_activated_at > one.activated != ""
            if restarted or now >= one.again_at:
                due.append(one)
        if due:
            logger.info("asking %d sites again", len(due))
            self._send(due)

    def _answer(self, asked: _Asked, reply: Message) -> Message | None:
        """What the site itself says, or None: what Flower makes up for a lost message is no answer."""
        if reply.has_error():
            if reply.error.code == CLIENT_RAISED:
                return reply
            logger.info("Flower: %s", reply.error.reason)
            return None
        try:
            reply.content = unpack(reply.content)
        except ValueError as error:
            return unusable_reply(asked.first, f"the reply can't be unpacked: {error}")
        node = self._nodes.get(asked.request.metadata.dst_node_id)
        self._statements.take(reply.content, node.name if node is not None else "")
        again, refused = reply.content.get(wire.AGAIN), reply.content.get(wire.REFUSED)
        if isinstance(again, ConfigRecord):
            logger.info("a site asks to be asked again: %s", again.get("reason"))
            return None
        if isinstance(refused, ConfigRecord):
            return unusable_reply(asked.first, str(refused.get("reason", "")))
        return reply
