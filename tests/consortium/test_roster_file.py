"""A party's roster goes forward, whoever writes it and whenever: a revocation stays."""

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from fedplat.consortium.identity import SigningKey
from fedplat.consortium.roster import OperatorEntry, Roster, SignedRoster, load_roster
from fedplat.consortium.roster_file import RosterFile
from tests.consortium.conftest import Consortium

AUTHORITY = SigningKey.generate()
KEY = "0" * 64


def signed(version: int, *operators: str, consortium: str = "c", by: SigningKey = AUTHORITY) -> SignedRoster:
    entries = {name: OperatorEntry(identity=KEY) for name in operators}
    return Roster(consortium=consortium, version=version, issued="x", sites={}, operators=entries).sign(by)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    signed(3, "alice", "mallory").save(tmp_path / "roster.json")
    return tmp_path / "roster.json"


def test_an_offer_is_compared_with_what_is_on_disk_now(path):
    mine = RosterFile(path, AUTHORITY.public)
    signed(5, "alice").save(path)  # the administrator revokes mallory
    assert not mine.offer(signed(4, "alice", "mallory").model_dump_json())
    assert load_roster(path, AUTHORITY.public).version == 5 and mine.current.version == 5
    assert mine.offer(signed(6, "alice").model_dump_json())
    assert load_roster(path, AUTHORITY.public).version == 6 == mine.newest().version


def test_the_newest_is_what_the_file_has_now(path):
    mine = RosterFile(path, AUTHORITY.public)
    signed(5, "alice").save(path)
    assert "mallory" not in mine.newest().operators
    signed(4, "alice", "mallory").save(path)
    assert mine.newest().version == 5


@pytest.mark.parametrize(
    "content",
    ["junk", signed(9, by=SigningKey.generate()).model_dump_json(), signed(9, consortium="d").model_dump_json(), None],
)
def test_a_file_that_is_no_roster_of_ours_changes_nothing(content, path):
    mine = RosterFile(path, AUTHORITY.public)
    path.unlink() if content is None else path.write_text(content)
    assert mine.newest().version == 3
    assert mine.offer(signed(4, "alice").model_dump_json())
    assert load_roster(path, AUTHORITY.public).version == 4


def test_an_unchanged_file_is_not_read_again(path, monkeypatch):
    mine = RosterFile(path, AUTHORITY.public)
    monkeypatch.setattr("fedplat.consortium.roster_file.load_roster", lambda *_: pytest.fail("read again"))
    assert mine.newest().version == 3


@pytest.mark.parametrize(("name", "file"), [("north", "site.yaml"), ("server", "server.yaml")])
def test_a_pod_that_starts_again_keeps_a_newer_roster_and_its_own_rules(
    consortium: Consortium, tmp_path: Path, name: str, file: str
) -> None:
    """The secret is as old as the day it was made; the server has relayed a newer roster since."""
    secret, kit = consortium.kit(name), tmp_path / "kit"
    kit.mkdir()
    objects = yaml.safe_load_all((secret / "kubernetes" / file).read_text())
    pod = next(made for made in objects if made["kind"] == "Deployment")["spec"]["template"]["spec"]
    script = pod["initContainers"][0]["command"][2].partition(" && chown")[0]
    script = re.sub("/(secret|kit)/", lambda found: f"{secret if found[1] == 'secret' else kit}/", script)

    def start() -> None:
        subprocess.run(["sh", "-c", script], check=False, capture_output=True)

    start()
    assert (kit / "roster.json").read_bytes() == (secret / "roster.json").read_bytes()
    old = (secret / "roster.json").read_bytes()
    consortium.provision(revoke=["south"])
    new = (secret / "roster.json").read_bytes()
    (kit / "roster.json").write_bytes(new)
    (secret / "roster.json").write_bytes(old)
    (kit / "site.toml").write_text("mine")
    (kit / "ca.crt").write_text("old")
    start()
    assert (kit / "roster.json").read_bytes() == new and (kit / "site.toml").read_text() == "mine"
    assert (kit / "ca.crt").read_bytes() == (secret / "ca.crt").read_bytes()
    (kit / "roster.json").write_bytes(old)
    (secret / "roster.json").write_bytes(new)
    start()
    assert (kit / "roster.json").read_bytes() == new
