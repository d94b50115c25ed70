"""A party's own copy of the roster: it goes forward, never back, whoever offers what."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedplat.consortium.identity import SigningKey
from fedplat.consortium.roster import PURPOSE, OperatorEntry, Roster, SignedRoster, load_roster, parse_roster
from fedplat.consortium.roster_file import RosterFile
from fedplat.errors import UsageError

LAWS = settings(max_examples=30, deadline=None)
AUTHORITY, EVE = SigningKey.generate(), SigningKey.generate()


def roster(version: int, consortium: str = "alpha", operator: str = "olga") -> Roster:
    operators = {operator: OperatorEntry(identity="ab" * 32)}
    return Roster(consortium=consortium, version=version, issued="now", sites={}, operators=operators)


def text(version: int, by: SigningKey = AUTHORITY, **changes: str) -> str:
    return roster(version, **changes).sign(by).model_dump_json()


def file_at(folder: Path, version: int = 5) -> RosterFile:
    roster(version).sign(AUTHORITY).save(folder / "roster.json")
    return RosterFile(folder / "roster.json", AUTHORITY.public)


@LAWS
@given(st.lists(st.integers(1, 9), max_size=8))
def test_a_roster_never_goes_back_over_offers_and_restarts(tmp_path_factory, offered):
    folder, highest = tmp_path_factory.mktemp("roster"), 5
    kept = file_at(folder)
    for version in offered:
        assert kept.offer(text(version)) == (version > highest)
        highest = max(highest, version)
        assert kept.current.version == highest
        assert parse_roster(kept.text()).roster == kept.current
        assert RosterFile(folder / "roster.json", AUTHORITY.public).current == kept.current


IGNORED = {
    "nothing": "",
    "junk": "junk",
    "no roster": "{}",
    "brackets": "[" * 100_000,
    "somebody else's": text(9, EVE),
    "unsigned": SignedRoster(roster=roster(9), signature="").model_dump_json(),
    "another consortium of the same authority": text(9, consortium="beta"),
    "the same version": text(5, operator="eve"),
    "an older one": text(4),
    "a version changed": text(4).replace('"version":4', '"version":9'),
    "an operator changed": text(9).replace("olga", "eve"),
    "another purpose": SignedRoster(
        roster=roster(9), signature=AUTHORITY.sign("job", roster(9).model_dump(mode="json"))
    ).model_dump_json(),
}


@pytest.mark.parametrize("offered", IGNORED.values(), ids=IGNORED.keys())
def test_anything_but_a_newer_genuine_one_is_ignored(offered, tmp_path):
    kept = file_at(tmp_path)
    before = kept.text()
    assert not kept.offer(offered)
    assert kept.text() == before and kept.current == roster(5)


def test_a_newer_file_is_taken_up_and_an_older_one_is_not(tmp_path):
    kept = file_at(tmp_path)
    roster(6).sign(AUTHORITY).save(tmp_path / "roster.json")
    assert kept.refresh().version == 6
    roster(2).sign(AUTHORITY).save(tmp_path / "roster.json")
    assert kept.refresh().version == kept.current.version == 6


def test_a_file_that_the_authority_did_not_sign_is_refused(tmp_path):
    kept = file_at(tmp_path)
    roster(9).sign(EVE).save(tmp_path / "roster.json")
    with pytest.raises(UsageError, match=r"roster\.json: the roster is not signed by this consortium's authority"):
        kept.refresh()
    with pytest.raises(UsageError):
        RosterFile(tmp_path / "roster.json", AUTHORITY.public)
    assert kept.current.version == 5
    with pytest.raises(UsageError, match="part of the kit"):
        load_roster(tmp_path / "none.json", AUTHORITY.public)


def test_a_signed_roster_survives_its_file(tmp_path):
    signed = roster(7).sign(AUTHORITY)
    signed.save(tmp_path / "roster.json")
    assert parse_roster((tmp_path / "roster.json").read_text()) == signed
    assert load_roster(tmp_path / "roster.json", AUTHORITY.public) == roster(7)
    assert AUTHORITY.sign(PURPOSE, roster(7).model_dump(mode="json")) == signed.signature
