"""Signed heads: a site that comes back with an older ledger meets its own signature; nobody else can make it refuse."""

import json
import shutil
import time as clock
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedplat.consortium.identity import SigningKey
from fedplat.consortium.roster import Roster, SiteEntry
from fedplat.errors import JobError
from privacy.ledger import Ledger
from privacy.ledger_heads import (
    HEAD,
    STATEMENT,
    KnownHeads,
    SignedHead,
    Statement,
    parse_statement,
    require_newest,
    sign_head,
)
from tests.privacy.ledgers import fill, new_ledger

KEYS = {name: SigningKey.generate() for name in ("north", "south", "west")}
ROSTER = Roster(
    consortium="alpha",
    version=1,
    issued="now",
    sites={name: SiteEntry(identity=key.public, node="") for name, key in KEYS.items()},
    operators={},
)
LAWS = settings(max_examples=60, deadline=None)
LEDGERS = ("one", "two")


def head(
    site: str = "north", seq: int = 1, fork: int = 0, ledger: str = "one", by: str | None = None, purpose: str = HEAD
) -> SignedHead:
    """A head as `by` signs it (the site itself, unless a test says otherwise)."""
    unsigned = SignedHead(site=site, ledger=ledger, seq=seq, hash=f"{fork:02x}" * 32)
    return unsigned.model_copy(update={"signature": KEYS[by or site].sign(purpose, unsigned.body())})


def statement(site: str = "north", *heads: SignedHead, time: float = 1.0, by: str | None = None) -> Statement:
    unsigned = Statement(site=site, time=time, heads=heads, audit="00" * 32)
    return unsigned.model_copy(update={"signature": KEYS[by or site].sign(STATEMENT, unsigned.body())})


@pytest.fixture
def known(tmp_path: Path) -> KnownHeads:
    return KnownHeads(tmp_path / "heads.json")


# --- who may say what ------------------------------------------------------------------------------

FORGED = {
    "another site's key": head("north", 9, by="south"),
    "no signature": head("north", 9).model_copy(update={"signature": ""}),
    "no hex": head("north", 9).model_copy(update={"signature": "zz" * 64}),
    "another purpose": head("north", 9, purpose=STATEMENT),
    "a number changed": head("north", 8).model_copy(update={"seq": 9}),
    "a hash changed": head("north", 9).model_copy(update={"hash": "ff" * 32}),
    "a ledger changed": head("north", 9).model_copy(update={"ledger": "two"}),
    "a name changed": head("south", 9).model_copy(update={"site": "north"}),
    "a stranger": head("north", 9).model_copy(update={"site": "east"}),
}


@pytest.mark.parametrize("forged", FORGED.values(), ids=FORGED.keys())
def test_what_a_site_did_not_sign_as_a_head_is_ignored(forged, known, tmp_path):
    known.hear([head("north", 2)], ROSTER)
    before = (tmp_path / "heads.json").read_bytes()
    assert not forged.is_genuine(ROSTER)
    assert known.hear([forged], ROSTER) == []
    assert known.all() == {"north": head("north", 2)}
    assert (tmp_path / "heads.json").read_bytes() == before


def test_a_revoked_site_is_no_longer_heard(known):
    without = ROSTER.model_copy(update={"sites": {n: e for n, e in ROSTER.sites.items() if n != "north"}})
    assert known.hear([head("north", 5)], without) == [] and known.all() == {}
    assert not statement("north").is_genuine(without)


def test_a_statement_is_its_speakers_own():
    told = statement("north", head("south", 3))
    assert told.is_genuine(ROSTER) and told.about("south") == head("south", 3) and told.about("west") is None
    assert not statement("north", by="south").is_genuine(ROSTER)
    for change in (
        {"time": 2.0},
        {"heads": ()},
        {"nonce": "aa" * 16},
        {"heard": {"west": "aa" * 16}},
        {"audit": "11" * 32},
        {"budget": {"digits": 1.0}},
        {"site": "south"},
    ):
        assert not told.model_copy(update=change).is_genuine(ROSTER)


def test_a_head_never_passes_for_a_statement_nor_the_other_way():
    body = head("north", 1).body()
    assert not head("north", 1).model_copy(update={"signature": KEYS["north"].sign(STATEMENT, body)}).is_genuine(ROSTER)
    told = statement("north")
    assert not told.model_copy(update={"signature": KEYS["north"].sign(HEAD, told.body())}).is_genuine(ROSTER)


budgets = st.none() | st.dictionaries(st.text(max_size=5), st.floats(allow_nan=False, allow_infinity=False), max_size=2)
heard = st.dictionaries(st.sampled_from(sorted(KEYS)), st.sampled_from(["", "cd" * 16]))
heads = st.builds(head, st.sampled_from(sorted(KEYS)), st.integers(0, 2**62), st.integers(0, 255), st.text(max_size=9))


@LAWS
@given(st.lists(heads, max_size=3, unique_by=lambda one: one.site), st.floats(0, 1e9), budgets, heard)
def test_a_statement_survives_json(told, time, budget, heard):
    unsigned = Statement(
        site="north", time=time, heads=tuple(told), audit="ab" * 32, budget=budget, nonce="ef" * 16, heard=heard
    )
    made = unsigned.model_copy(update={"signature": KEYS["north"].sign(STATEMENT, unsigned.body())})
    again = parse_statement(made.model_dump_json())
    assert again == made and again is not None and again.is_genuine(ROSTER)
    assert all(one.is_genuine(ROSTER) for one in again.heads)


NO_STATEMENTS = ["", "{}", "null", "[]", "junk", '"x"', "NaN", "[" * 100_000, '{"a":' * 100_000, "1" * 5000, "\ud800"]


@pytest.mark.parametrize("text", NO_STATEMENTS, ids=lambda text: repr(text[:9]))
def test_what_is_no_statement_is_none_and_never_an_exception(text):
    """It comes from a site or a server that nobody trusts, and is read by all the others."""
    assert parse_statement(text) is None


@pytest.mark.parametrize("value", ["NaN", "Infinity", "1e999"])
def test_numbers_beyond_json_are_not_genuine(value):
    told = parse_statement(statement("north").model_dump_json().replace('"time":1.0', f'"time":{value}'))
    assert told is None or not told.is_genuine(ROSTER)


def signed(**body: object) -> str:
    """A statement as a site that keeps to no rule would sign it."""
    unsigned = statement("north").model_copy(update=body)
    return unsigned.model_copy(update={"signature": KEYS["north"].sign(STATEMENT, unsigned.body())}).model_dump_json()


def _of(site: str) -> SignedHead:
    return head("south", 1).model_copy(update={"site": site})


BEYOND = {
    "two heads of one site": lambda: signed(heads=(head("south", 1), head("south", 2))),
    "more heads than sites can be": lambda: signed(heads=tuple(_of(f"s{n}") for n in range(257))),
    "more budgets than there are accounts": lambda: signed(budget={f"a{n}": 1.0 for n in range(65)}),
    "more heard than sites can be": lambda: signed(heard={f"s{n}": "" for n in range(257)}),
    "from the future": lambda: signed(time=clock.time() + 301),
    "larger than 64 KB": lambda: statement("north").model_dump_json() + " " * (1 << 16),
    "a number that no ledger can have": lambda: signed(heads=(head("south", 1).model_copy(update={"seq": 2**63}),)),
    "an endless name": lambda: signed(heads=(head("south", 1).model_copy(update={"ledger": "x" * 65}),)),
    "an endless nonce": lambda: signed(nonce="a" * 33),
    "an infinite budget": lambda: signed().replace('"budget":null', '"budget":{"a":Infinity}'),
    "a budget that is none": lambda: signed().replace('"budget":null', '"budget":{"a":NaN}'),
}  # fmt: skip


@pytest.mark.parametrize("make", BEYOND.values(), ids=BEYOND.keys())
def test_a_statement_beyond_what_a_site_can_mean_is_none(make):
    assert parse_statement(make()) is None


def test_a_clock_that_is_a_little_ahead_is_forgiven():
    assert parse_statement(signed(time=clock.time() + 290)) is not None


# --- the newest wins ---------------------------------------------------------------------------------


@LAWS
@given(st.lists(st.tuples(st.sampled_from(sorted(KEYS)), st.integers(0, 6)), max_size=12))
def test_the_newest_head_of_each_site_is_known_in_whatever_order_they_come(tmp_path_factory, told):
    path = tmp_path_factory.mktemp("heads") / "heads.json"
    heard = KnownHeads(path)
    for site, seq in told:
        assert heard.hear([head(site, seq)], ROSTER) == []
    newest = {site: max(seq for name, seq in told if name == site) for site, _ in told}
    assert {site: one.seq for site, one in heard.all().items()} == newest
    assert KnownHeads(path).all() == heard.all()


def test_two_ledgers_with_one_number_raise_an_alarm_and_change_nothing(known):
    known.hear([head("north", 4, fork=1)], ROSTER)
    alarms = known.hear([head("north", 4, fork=2), head("south", 1)], ROSTER)
    assert alarms == ["site 'north' has signed two different ledgers with 4 entries"]
    assert known.all()["north"] == head("north", 4, fork=1) and known.all()["south"].seq == 1


def test_another_ledger_raises_an_alarm(known):
    known.hear([head("north", 4)], ROSTER)
    assert known.hear([head("north", 1, ledger="two")], ROSTER) == ["site 'north' has another ledger than before"]


def test_the_newest_head_of_a_ledger_is_never_forgotten(known, tmp_path):
    """Neither another ledger in between nor an older head of the same brings the number down."""
    known.hear([head("north", 100)], ROSTER)
    for told in (head("north", 0, ledger="two"), head("north", 5), head("north", 3, ledger="two")):
        known.hear([told], ROSTER)
        assert known.all()["north"] == head("north", 100)
    assert {one.ledger: one.seq for one in known.of("north")} == {"one": 100, "two": 3}
    assert KnownHeads(tmp_path / "heads.json").of("north") == known.of("north")
    assert known.of("west") == []


def test_a_site_can_not_fill_the_disk_nor_the_audit_log_of_others(known, tmp_path, monkeypatch):
    flood = [head("north", 1, ledger=f"l{n}") for n in range(300)]
    alarms = [alarm for one in flood for alarm in known.hear([one], ROSTER)]
    alarms += known.hear(flood * 3 + [head("north", 1, fork=n, ledger="l0") for n in range(50)], ROSTER)
    assert alarms == ["site 'north' has another ledger than before"]
    assert len(known.of("north")) == 16 and (tmp_path / "heads.json").stat().st_size < 16 * 400
    assert known.hear([head("south", 1), head("south", 1, ledger="two")], ROSTER) != []  # another site's first
    later = clock.monotonic() + 3601
    monkeypatch.setattr(clock, "monotonic", lambda: later)
    assert known.hear([head("north", 1, ledger="new")], ROSTER) != []


def test_what_is_known_already_costs_no_signature(known, monkeypatch):
    told = [head(site, 7) for site in KEYS]
    known.hear(told, ROSTER)
    monkeypatch.setattr(SignedHead, "is_genuine", lambda *_: pytest.fail("checked again"))
    known.hear([*told, head("north", 3)] * 10, ROSTER)


def test_a_head_signed_anew_with_a_new_key_takes_the_place_of_the_old(known):
    known.hear([head("north", 4)], ROSTER)
    entry = SiteEntry(identity=KEYS["west"].public, node="")
    rotated = ROSTER.model_copy(update={"sites": {**ROSTER.sites, "north": entry}})
    again = head("north", 4, by="west")
    assert known.hear([again], rotated) == [] and known.all()["north"] == again


def test_the_same_again_is_no_alarm(known):
    for _ in range(3):
        assert known.hear([head("north", 4)], ROSTER) == []


@pytest.mark.parametrize("content", ["junk", "[]", '{"north": 1}', '{"north": {}}'])
def test_a_damaged_file_is_not_an_empty_one(content, tmp_path):
    (tmp_path / "heads.json").write_text(content)
    with pytest.raises(JobError, match="Put it back from the newest copy"):
        KnownHeads(tmp_path / "heads.json")


# --- a ledger against what was signed of it ------------------------------------------------------------


def sign(ledger: Ledger) -> SignedHead:
    return sign_head(KEYS["north"], "north", ledger)


def test_the_true_ledger_is_accepted_at_any_later_time(tmp_path):
    with new_ledger(tmp_path / "ledger.sqlite") as ledger:
        signed = []
        for number in range(4):
            fill(ledger, 1, first=number)
            signed.append(sign(ledger))
            for one in signed:
                require_newest(ledger, one)
        assert all(one.is_genuine(ROSTER) for one in signed)
    with Ledger.open(tmp_path / "ledger.sqlite") as again:
        for one in signed:
            require_newest(again, one)


def copied(tmp_path: Path, name: str) -> Path:
    """A backup with its counter: both files are restored together, so the counter finds nothing wrong."""
    for suffix in ("", ".counter"):
        shutil.copy(tmp_path / f"ledger.sqlite{suffix}", tmp_path / f"{name}{suffix}")
    return tmp_path / name


def test_an_older_copy_a_fork_of_it_and_another_ledger_are_refused(tmp_path):
    path = tmp_path / "ledger.sqlite"
    with new_ledger(path) as ledger:
        fill(ledger, 2)
    backup = copied(tmp_path, "backup")
    with Ledger.open(path) as ledger:
        fill(ledger, 1, first=2)
        signed = sign(ledger)
    with Ledger.open(backup) as old:
        with pytest.raises(JobError, match=r"looks like a restored backup"):
            require_newest(old, signed)
        for number in range(3, 7):  # shorter than what was signed, as long, longer
            fill(old, 1, first=number)
            with pytest.raises(JobError, match=r"older than what other sites have seen of it|restored backup"):
                require_newest(old, signed)
    with new_ledger(tmp_path / "new.sqlite") as new:
        fill(new, 9)
        with pytest.raises(JobError, match="other sites know another ledger of this site"):
            require_newest(new, signed)


def test_a_head_is_the_ledgers_own(tmp_path):
    with new_ledger(tmp_path / "ledger.sqlite") as ledger:
        fill(ledger, 1)
        one = sign(ledger)
        assert (one.seq, one.hash, one.ledger) == (ledger.head().seq, ledger.head().hash, ledger.identity)
        assert SignedHead.model_validate(json.loads(one.model_dump_json())) == one
