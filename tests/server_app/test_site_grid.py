"""Every request to a real site gets one answer, whatever the network does on the way."""

import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from client_app.app import app as real_client
from fedplat import wire
from fedplat.consortium.identity import SigningKey
from fedplat.consortium.roster import Roster, SiteEntry
from fedplat.consortium.roster_file import RosterFile
from fedplat.events import RoundFinished, read_events
from fedplat.flower import CLIENT_RAISED, node_key
from fedplat.job import Job
from fedplat.rundir import RunDirectory
from fedplat.wire import Identity
from privacy.ledger_heads import STATEMENT, Statement, parse_statement
from server_app import site_grid
from server_app.run import start_run
from server_app.site_grid import SiteGrid, StatementStore
from simulations.local_grid import FIRST_NODE_ID, LocalGrid
from tests.server_app.lossy_grid import LossyGrid, always, at_random

AUTHORITY = SigningKey.generate()
NODES = ("eve", "south", "north", "west")
"""In the order of their node ids; eve is a site of the consortium, but not of the job."""
SITES = ("north", "south", "west")
KEYS = {name: SigningKey.generate() for name in NODES}
NODE_KEYS = {
    name: ec.generate_private_key(ec.SECP384R1())
    .public_key()
    .public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    .decode()
    for name in NODES
}
SHOWN = {name: node_key(key) for name, key in NODE_KEYS.items()}
"""As the SuperLink shows them."""
DEADLINE_S = 30.0


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site_grid, "SEND_AGAIN_S", 0.05)
    monkeypatch.setattr(site_grid, "SOON_S", 0.01)
    monkeypatch.setattr(site_grid, "NODES_EVERY_S", 0.01)


@pytest.fixture
def job(tiny_job) -> Job:
    return tiny_job(cohort__clients=3, cohort__fraction=1.0, cohort__sites=list(SITES))


def said_by(name: str, at: float = 1.0, by: str | None = None) -> str:
    unsigned = Statement(site=name, time=at, heads=(), audit="ab" * 32)
    return unsigned.model_copy(
        update={"signature": KEYS[by or name].sign(STATEMENT, unsigned.body())}
    ).model_dump_json()


@pytest.fixture
def store(tmp_path: Path) -> StatementStore:
    return store_in(tmp_path)


def store_in(folder: Path) -> StatementStore:
    entries = {name: SiteEntry(identity=key.public, node=NODE_KEYS[name]) for name, key in KEYS.items()}
    roster = Roster(consortium="alpha", version=1, issued="now", sites=entries, operators={})
    roster.sign(AUTHORITY).save(folder / "roster.json")
    return StatementStore(folder / "statements.json", RosterFile(folder / "roster.json", AUTHORITY.public))


Answer = Callable[[str, int, Message], RecordDict]


class Sites:
    """Stand-ins for agents: they say who they are, and remember what they were asked."""

    def __init__(self, answer: Answer | None = None) -> None:
        self.app, self.asked = ClientApp(), Counter[str]()
        self.requests: list[RecordDict] = []

        @self.app.train()
        def train(message: Message, context: Context) -> Message:
            name = NODES[context.node_id - FIRST_NODE_ID]
            self.asked[name] += 1
            self.requests.append(message.content)
            content = RecordDict() if answer is None else answer(name, self.asked[name], message)
            content["me"] = ConfigRecord({"site": name, "question": str(message.content["question"]["text"])})
            content.setdefault(wire.SITE, ConfigRecord({"statement": said_by(name, float(self.asked[name]))}))
            return Message(content, reply_to=message)

    def grid(self, fate=None) -> LossyGrid:
        return LossyGrid(LocalGrid(self.app, len(NODES), {}), NODES, fate or always(), keys=dict(SHOWN))


def question(node: int, text: str = "?") -> Message:
    return Message(RecordDict({"question": ConfigRecord({"text": text})}), dst_node_id=node, message_type="train")


def asked_of(grid: SiteGrid, text: str = "?") -> list[Message]:
    return [question(node, text) for node in grid.get_node_ids()]


def answers(grid: SiteGrid, ids: Iterable[str], deadline_s: float = DEADLINE_S) -> dict[str, Message]:
    """Pull until all are answered; no id is ever answered twice or by a stranger."""
    pending, found = set(ids), dict[str, Message]()
    deadline = time.monotonic() + deadline_s
    while pending and time.monotonic() < deadline:
        for reply in grid.pull_messages(pending):
            reply_to = reply.metadata.reply_to_message_id
            assert reply_to in pending
            pending.remove(reply_to)
            found[reply_to] = reply
        time.sleep(0.001)
    return found


# --- what is lost is asked for again -------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
def test_every_request_gets_exactly_one_answer_under_the_id_first_returned(seed, job, store):
    sites = Sites()
    grid = SiteGrid(sites.grid(at_random(seed)), job, store)
    for number in range(3):
        requests = asked_of(grid, f"{seed}-{number}")
        ids = list(grid.push_messages(requests))
        assert len(set(ids)) == len(requests) == 3
        found = answers(grid, ids)
        assert set(found) == set(ids)
        for message_id, request in zip(ids, requests, strict=True):
            reply = found[message_id]
            assert reply.metadata.src_node_id == request.metadata.dst_node_id
            assert reply.content["me"]["question"] == f"{seed}-{number}"
            assert NODES[reply.metadata.src_node_id - FIRST_NODE_ID] == reply.content["me"]["site"]
        for _ in range(30):  # what comes late or twice is nobody's answer any more
            assert list(grid.pull_messages(ids)) == []


def test_two_sendings_that_are_answered_together_are_one_answer(job, store):
    inner = Sites().grid(always("late"))
    inner.one_at_a_time = False
    grid = SiteGrid(inner, job, store)
    ids = list(grid.push_messages(asked_of(grid)))
    while inner.times()["north"] < 2:  # the first is still under way when it is sent again
        assert list(grid.pull_messages([])) == []
        grid._send_again(list(grid._asked.values()))
        time.sleep(0.01)
    inner.pulls += 100  # now both are there
    found = list(grid.pull_messages(ids))
    assert sorted(reply.metadata.reply_to_message_id for reply in found) == sorted(ids)


@pytest.mark.parametrize("fate", ["lost", "reply lost", "made-up error"])
def test_what_is_lost_is_sent_again_until_it_is_answered(fate, job, store):
    sites = Sites()
    inner = sites.grid(always(fate, fate, fate))
    grid = SiteGrid(inner, job, store)
    ids = list(grid.push_messages(asked_of(grid)))
    assert set(answers(grid, ids)) == set(ids)
    assert all(inner.times()[site] >= 4 for site in SITES)
    assert ids == [
        next(one.message_id for one in inner.sent if one.site == site) for site in ("south", "north", "west")
    ]


def test_what_is_answered_at_once_is_asked_once(job, store, monkeypatch):
    monkeypatch.setattr(site_grid, "SEND_AGAIN_S", 30.0)
    sites = Sites()
    inner = sites.grid()
    grid = SiteGrid(inner, job, store)
    answers(grid, grid.push_messages(asked_of(grid)))
    assert inner.times() == {"eve": 0, "north": 1, "south": 1, "west": 1} and sites.asked.total() == 3


@pytest.mark.parametrize("code", [0, 1, 3, 4, 5, 6, 99])
def test_what_flower_makes_up_is_no_answer(code, job, store):
    inner = Sites().grid(always("made-up error"))
    inner.error_code = code
    grid = SiteGrid(inner, job, store)
    found = answers(grid, grid.push_messages(asked_of(grid)))
    assert len(found) == 3 and not any(reply.has_error() for reply in found.values())


def test_a_sites_own_refusal_is_an_answer(job, store):
    def refuse(name: str, times: int, message: Message) -> RecordDict:
        raise ValueError("policy.hours: this site works from 20:00-06:00")

    sites = Sites(refuse)
    inner = sites.grid()
    grid = SiteGrid(inner, job, store)
    found = answers(grid, grid.push_messages(asked_of(grid)))
    assert len(found) == 3 and sites.asked.total() == 3
    for reply in found.values():
        assert reply.has_error() and reply.error.code == CLIENT_RAISED and "policy.hours" in str(reply.error.reason)


def test_a_refusal_that_comes_with_a_statement_is_an_error_for_whoever_asked(job, store):
    sites = Sites(lambda *_: RecordDict({wire.REFUSED: ConfigRecord({"reason": "policy.hours: closed"})}))
    grid = SiteGrid(sites.grid(), job, store)
    found = answers(grid, grid.push_messages(asked_of(grid)))
    assert len(found) == 3 and sites.asked.total() == 3 and set(store.newest) == set(SITES)
    assert all(reply.has_error() and "policy.hours" in str(reply.error.reason) for reply in found.values())


def test_a_site_that_can_not_answer_yet_is_asked_again(job, store, monkeypatch):
    monkeypatch.setattr(site_grid, "SEND_AGAIN_S", 30.0)  # soon is enough

    def later(name: str, times: int, message: Message) -> RecordDict:
        wait = RecordDict({wire.AGAIN: ConfigRecord({"reason": "policy.witnesses: 0 of 1"})})
        return wait if times < 4 else RecordDict()

    sites = Sites(later)
    grid = SiteGrid(sites.grid(), job, store)
    found = answers(grid, grid.push_messages(asked_of(grid)))
    assert len(found) == 3 and all(wire.AGAIN not in reply.content for reply in found.values())
    assert sites.asked == {"north": 4, "south": 4, "west": 4}
    assert set(store.newest) == set(SITES)  # what it said of its ledger counts all the same


def test_a_node_that_has_restarted_is_asked_at_once(job, store, monkeypatch):
    monkeypatch.setattr(site_grid, "SEND_AGAIN_S", 600.0)
    inner = Sites().grid(always("lost"))
    grid = SiteGrid(inner, job, store)
    ids = list(grid.push_messages(asked_of(grid)))
    assert answers(grid, ids, 0.2) == {}
    inner.activated["north"] = "2026-01-02"
    (reply,) = answers(grid, ids, 1.0).values()
    assert reply.content["me"]["site"] == "north"
    assert inner.times() == {"eve": 0, "north": 2, "south": 1, "west": 1}


def test_a_node_that_is_asked_anew_owes_no_answer_to_what_it_was_asked_before(job, store):
    grid = SiteGrid(Sites().grid(always("lost")), job, store)
    old = list(grid.push_messages(asked_of(grid, "old")))
    new = list(grid.push_messages(asked_of(grid, "new")))
    found = answers(grid, new)
    assert {reply.content["me"]["question"] for reply in found.values()} == {"new"}
    assert answers(grid, old, 0.3) == {}


def test_a_message_that_was_not_taken_has_no_id(job, store):
    grid = SiteGrid(Sites().grid(always("not taken")), job, store)
    assert list(grid.push_messages(asked_of(grid))) == ["", "", ""]
    assert list(grid.pull_messages([""])) == []


def test_ids_that_nobody_knows_are_no_error(job, store):
    assert list(SiteGrid(Sites().grid(), job, store).pull_messages(["nothing"])) == []


def test_send_and_receive_returns_what_came_before_its_timeout(job, store):
    inner = Sites().grid(lambda site: "lost" if site == "west" else "fine")
    grid = SiteGrid(inner, job, store)
    started = time.monotonic()
    replies = list(grid.send_and_receive(asked_of(grid), timeout=1.0))
    assert {reply.content["me"]["site"] for reply in replies} == {"north", "south"}
    assert time.monotonic() - started < DEADLINE_S and inner.times()["west"] > 1


# --- who is there ----------------------------------------------------------------------------------------


def test_only_the_jobs_sites_are_visible_each_under_its_client_name(job, store):
    inner = Sites().grid()
    grid = SiteGrid(inner, job, store)
    named = {node.name: node.node_id for node in grid.get_nodes()}
    assert named == {
        f"client-{number}": FIRST_NODE_ID + NODES.index(site) for number, site in enumerate(job.cohort.sites)
    }
    assert list(grid.get_node_ids()) == [FIRST_NODE_ID + 1, FIRST_NODE_ID + 2, FIRST_NODE_ID + 3]
    assert {node.name for node in inner.get_nodes()} == set(NODES)  # Flower's own are left alone


def test_a_site_that_is_away_is_seen_for_a_rounds_deadline_and_no_longer(tiny_job, store):
    job = tiny_job(cohort__clients=3, cohort__fraction=1.0, cohort__sites=list(SITES), cohort__deadline_s=0.3)
    inner = Sites().grid()
    grid = SiteGrid(inner, job, store)
    assert len(list(grid.get_nodes())) == 3
    inner.away.add("south")
    deadline = time.monotonic() + DEADLINE_S
    while len(list(grid.get_nodes())) == 3:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert {node.name for node in grid.get_nodes()} == {"client-0", "client-2"}
    inner.away.clear()
    assert len(list(grid.get_nodes())) == 3


def test_a_node_is_who_its_key_says(job, store):
    inner = Sites().grid()
    inner.keys["north"] = SHOWN["eve"]
    assert {node.name for node in SiteGrid(inner, job, store).get_nodes()} == {"client-1", "client-2"}


def test_a_node_that_calls_itself_a_client_is_none(job, store):
    inner = Sites().grid()
    inner.sites = ("client-0", "client-1", "north", "NORTH")
    inner.keys = dict.fromkeys(inner.sites, SHOWN["north"])
    assert [node.node_id for node in SiteGrid(inner, job, store).get_nodes()] == [FIRST_NODE_ID + 2]


# --- statements ------------------------------------------------------------------------------------------


def test_statements_are_taken_off_replies_and_go_along_with_requests(job, store):
    sites = Sites()
    grid = SiteGrid(sites.grid(), job, store)
    requests = asked_of(grid)
    found = answers(grid, grid.push_messages(requests))
    assert all(set(reply.content) == {"me"} for reply in found.values())
    assert all(set(request.content) == {"question"} for request in requests)  # the strategy's own is left alone
    assert all(content[wire.PEERS]["statements"] == [] for content in sites.requests)
    answers(grid, grid.push_messages(asked_of(grid)))
    for content in sites.requests[3:]:
        told = [parse_statement(str(text)) for text in content[wire.PEERS]["statements"]]
        assert [one.site for one in told if one is not None] == ["north", "south", "west"]
        assert content[wire.PEERS]["roster"] == store.roster.text()


def test_the_newest_statement_is_kept_over_restarts(job, tmp_path):
    store = store_in(tmp_path)
    times = {"north": [5.0, 3.0, 9.0, 7.0], "south": [2.0, 1.0, 1.0, 1.0], "west": [1.0] * 4}

    def say(name: str, count: int, message: Message) -> RecordDict:
        return RecordDict({wire.SITE: ConfigRecord({"statement": said_by(name, times[name][count - 1])})})

    grid = SiteGrid(Sites(say).grid(), job, store)
    for _ in range(4):
        answers(grid, grid.push_messages(asked_of(grid)))
    for kept in (store, store_in(tmp_path)):
        assert {name: one.time for name, one in kept.newest.items()} == {"north": 9.0, "south": 2.0, "west": 1.0}


SAID = {
    "another's key": ConfigRecord({"statement": said_by("north", 99.0, by="west")}),
    "another purpose": ConfigRecord({"statement": said_by("north", 99.0).replace('"time":99.0', '"time":98.0')}),
    "nothing": ConfigRecord({}),
    "junk": ConfigRecord({"statement": "junk"}),
    "a number": ConfigRecord({"statement": 1}),
    "a list": ConfigRecord({"statement": ["x"]}),
    "brackets": ConfigRecord({"statement": "[" * 100_000}),
    "metrics": MetricRecord({"statement": 1.0}),
    "arrays": wire.encode_arrays({"statement": np.zeros(3)}),
}


@pytest.mark.parametrize("said", SAID.values(), ids=SAID.keys())
def test_what_is_no_genuine_statement_is_dropped_and_its_reply_stays_an_answer(said, job, store):
    grid = SiteGrid(Sites(lambda *_: RecordDict({wire.SITE: said})).grid(), job, store)
    found = answers(grid, grid.push_messages(asked_of(grid)))
    assert len(found) == 3 and store.newest == {}
    assert all(set(reply.content) == {"me"} for reply in found.values())


@pytest.mark.parametrize("content", ["", "junk", "{}", '["junk"]', '["{}"'])
def test_a_damaged_file_of_statements_is_no_obstacle(content, tmp_path):
    (tmp_path / "statements.json").write_text(content)
    assert store_in(tmp_path).newest == {}


# --- a whole run ---------------------------------------------------------------------------------------------


def run_over(grid, job: Job, folder: Path) -> RunDirectory:
    directory = RunDirectory.create(folder, job)
    start_run(job, grid, directory, (), where="flower")
    return directory


@pytest.mark.parametrize("seed", range(3))
def test_a_lossy_network_changes_nothing_about_the_model(seed, tiny_job, tmp_path, store):
    job = tiny_job(
        cohort__clients=3, cohort__fraction=1.0, cohort__sites=list(SITES), local__steps=2, cohort__deadline_s=60.0,
        evaluation__clients=1.0, data__holdout=0.2, job__rounds=2,
    )  # fmt: skip

    def local() -> LocalGrid:
        return LocalGrid(real_client, 3, {wire.JOB_KEY: job.canonical()})

    plain = run_over(local(), job, tmp_path / "plain")
    inner = LossyGrid(local(), SITES, at_random(seed), keys=dict(SHOWN))
    lossy = run_over(SiteGrid(inner, job, store), job, tmp_path / "lossy")
    assert lossy.model_file.read_bytes() == plain.model_file.read_bytes()
    rounds = [event for event in read_events(lossy.events_file) if isinstance(event, RoundFinished)]
    assert [(event.accepted, event.failed, event.late) for event in rounds] == [(3, 0, 0)] * 2
    assert len(inner.sent) > 12  # something was lost on the way
    assert all(Identity.of(one.request.content, wire.CONFIG).attempt == 1 for one in inner.sent)
