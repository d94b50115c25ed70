"""Who takes part: the roster of connected clients, the cohort of a round, and a Grid with only that cohort.

The driver samples by client *name* from the job's own list, so the cohort of round r depends only
on (seed, r), not on node ids, on the order of connection or on who happens to be online.

Where privacy is claimed for the sampling itself (unit client, Poisson or fixed size), the cohort comes from the
operating system's randomness instead: a cohort that follows from a public seed hides nobody. It is then a secret of
the server, and a repeated round draws a new one.
"""

import time
from collections.abc import Iterable, Mapping

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.run import Run

from fedplat import wire
from fedplat.errors import JobError, UsageError
from fedplat.federation import natural_order
from fedplat.job import Job
from fedplat.streams import numpy_stream
from privacy.randomness import Keystream, insecure_stream, secure_stream
from server_app.exchange import Exchange

HELLO = "query.hello"
HELLO_DEADLINE_S = 60.0
ASK_AGAIN_S = 600.0
MOST_POLLS = 20


def sample_cohort(names: list[str], size: int, *labels: str | int) -> list[str]:
    """`size` names without replacement, in natural order, from the stream that the labels name."""
    chosen = numpy_stream(*labels).choice(len(names), size=size, replace=False)
    return natural_order([names[i] for i in chosen])


def round_cohort(job: Job, names: list[str], number: int) -> list[str]:
    """Who trains in a round, sampled as the job's privacy claims. A Poisson cohort may be empty."""
    size, seed, privacy = job.cohort.cohort_size, job.job.seed, job.privacy
    sampling = privacy.sampling if privacy is not None and privacy.unit == "client" else "none"
    if sampling == "none":
        return sample_cohort(names, size, seed, "cohort", number)
    if sampling == "banded":
        return sample_cohort(_band(job, names, number), size, seed, "cohort", number)
    insecure = privacy is not None and privacy.insecure_noise
    stream = insecure_stream(seed, "cohort", number) if insecure else secure_stream()
    if sampling == "poisson":
        return [names[row] for row in stream.uniform_rows(len(names), size / len(names))]
    return [names[row] for row in sorted(_subset(stream, len(names), size))]


def _band(job: Job, names: list[str], number: int) -> list[str]:
    """The clients whose turn it is: dealt once into min_separation groups, which take turns.

    So two rounds of one client are at least min_separation apart, without any memory of who took part.
    """
    assert job.privacy is not None and job.privacy.min_separation is not None
    groups = job.privacy.min_separation
    dealt = numpy_stream(job.job.seed, "bands").permutation(len(names))
    return natural_order([names[i] for i in dealt[number % groups :: groups]])


def _subset(stream: Keystream, n: int, size: int) -> set[int]:
    """`size` of n numbers, all subsets equally likely (Floyd's algorithm)."""
    chosen: set[int] = set()
    for last in range(n - size, n):
        drawn = stream.below(last + 1)
        chosen.add(last if drawn in chosen else drawn)
    return chosen


def require_cohorts(job: Job) -> None:
    """Refuse a job whose clients are too few for the rounds that each of them must stay away."""
    if job.privacy is None or job.privacy.min_separation is None:
        return
    needed = job.cohort.cohort_size * job.privacy.min_separation
    if job.cohort.clients < needed:
        raise UsageError(
            f"privacy.min_separation = {job.privacy.min_separation} with cohorts of {job.cohort.cohort_size} needs at "
            f"least {needed} clients, cohort.clients is {job.cohort.clients}: lower cohort.size or min_separation"
        )


class Roster:
    """Which node answers to which client name."""

    def __init__(self, grid: Grid, names: list[str]) -> None:
        self._grid = grid
        self._expected = set(names)
        self._node_of: dict[str, int] = {}
        self._name_of: dict[int, str] = {}
        self._ask_after: dict[int, float] = {}

    def wait(self, deadline_s: float, poll_s: float = 1.0) -> None:
        """Wait until all clients are there, or until the deadline if at least one is."""
        deadline = time.monotonic() + deadline_s
        while len(self.refresh()) < len(self._expected) and time.monotonic() < deadline:
            time.sleep(poll_s)
        if not self._node_of:
            raise JobError(f"no client connected within {deadline_s:.0f} s; expected {len(self._expected)}")

    def refresh(self) -> Mapping[str, int]:
        """The connected clients now, by name."""
        nodes = {node.node_id: node.name for node in self._grid.get_nodes()}
        self._name_of.update({node: name for node, name in nodes.items() if name})
        self._node_of = self._by_name(nodes)
        if len(self._node_of) < len(self._expected):
            self._ask_names([node for node in nodes if self._may_ask(node)])
            self._node_of = self._by_name(nodes)
        return self._node_of

    def _by_name(self, nodes: Mapping[int, str]) -> dict[str, int]:
        """Expected names of connected nodes. Where two nodes claim one name, the one that had it first keeps it."""
        held = {name: node for name, node in self._node_of.items() if node in nodes}
        for node in nodes:
            name = self._name_of.get(node, "")
            if name in self._expected:
                held.setdefault(name, node)
        return held

    def _may_ask(self, node: int) -> bool:
        """A node that said its name isn't asked again; one that stayed silent, only after a while."""
        return node not in self._name_of and time.monotonic() >= self._ask_after.get(node, 0.0)

    def _ask_names(self, nodes: list[int]) -> None:
        if not nodes:
            return
        exchange = Exchange(self._grid, HELLO_DEADLINE_S)
        exchange.send([Message(RecordDict(), dst_node_id=node, message_type=HELLO) for node in nodes])
        self._ask_after.update(dict.fromkeys(nodes, time.monotonic() + ASK_AGAIN_S))
        for request, reply in exchange.replies():
            record = wire.records(reply.content, ConfigRecord).get(wire.IDENTITY) if reply.has_content() else None
            if request is not None and record is not None:
                self._name_of[request.metadata.dst_node_id] = str(record.get("client", ""))


class CohortGrid(Grid):
    """A Grid that shows a strategy only the nodes of one cohort, and lets it reach no other."""

    def __init__(self, grid: Grid, node_ids: Iterable[int]) -> None:
        self._grid = grid
        self._node_ids = list(node_ids)
        self._asked = 0

    def set_run(self, run: Run) -> None:
        self._grid.set_run(run)

    @property
    def run(self) -> Run:
        return self._grid.run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        return self._grid.create_message(content, message_type, dst_node_id, group_id, ttl)

    def get_node_ids(self) -> Iterable[int]:
        """The cohort. Flower's strategies ask twice; one that polls for more nodes would wait for ever."""
        self._asked += 1
        if self._asked > MOST_POLLS:
            raise JobError("the strategy waits for more nodes than the cohort has: lower its own minimum")
        return list(self._node_ids)

    def get_nodes(self) -> Iterable[NodeInfo]:
        return [node for node in self._grid.get_nodes() if node.node_id in self._node_ids]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        return self._grid.push_messages(self._within(messages))

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return self._grid.pull_messages(message_ids)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        return self._grid.send_and_receive(self._within(messages), timeout=timeout)

    def _within(self, messages: Iterable[Message]) -> list[Message]:
        checked = list(messages)
        for message in checked:
            if message.metadata.dst_node_id not in self._node_ids:
                raise JobError(
                    f"the strategy addressed node {message.metadata.dst_node_id}, which is not in the cohort"
                )
        return checked
