"""Kits: what is in them, and that a change to one party is a change to that party alone."""

import fcntl
import json
import os
import stat
import sys
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization

from fedplat.consortium.authority import load_certificate, serial_text
from fedplat.consortium.identity import SigningKey
from fedplat.consortium.keygen import keygen
from fedplat.consortium.kit_files import OperatorKit, ServerKit, SiteKit, load_kit
from fedplat.consortium.roster import load_roster
from fedplat.errors import UsageError
from tests.consortium.conftest import Consortium

SHARED = {"roster.json"}
"""What every kit gets anew with each change."""
STRIDE = 3
"""Of the moments at which a crash is tried."""
RECORDS = {"authority/issued.json", "authority/access.json", "server/access.json"}


def _changed(before: dict[str, bytes], after: dict[str, bytes]) -> set[str]:
    names = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    return {name for name in names if Path(name).name not in SHARED and name not in RECORDS}


def _access(consortium: Consortium) -> dict[str, tuple[str, str]]:
    entries = json.loads((consortium.kits / "server" / "access.json").read_text())["serials"]
    return {entry["name"]: (serial, entry["role"]) for serial, entry in entries.items()}


def _serial(consortium: Consortium, name: str) -> str:
    return serial_text(load_certificate(consortium.kit(name) / "tls.crt"))


def _check_consistent(consortium: Consortium) -> None:
    """What must hold after every call, whatever happened before."""
    issued, authority = consortium.issued(), consortium.kits / "authority"
    key = SigningKey.load(authority / "authority.key").public
    master = (authority / "roster.json").read_bytes()
    roster = load_roster(authority / "roster.json", key)
    assert roster.version == issued.version
    active = {name: party for name, party in issued.parties.items() if not party.revoked and name != "server"}
    assert {*roster.sites, *roster.operators} == set(active)
    assert _access(consortium) == {name: (party.serial, party.role) for name, party in active.items()}
    for name, party in active.items():
        kit = load_kit(consortium.kit(name))
        assert isinstance(kit, SiteKit | OperatorKit)
        assert kit.roster.read_bytes() == master and kit.authority == key
        certificate = load_certificate(kit.certificate)
        assert serial_text(certificate) == party.serial
        if party.made_here:
            tls = serialization.load_pem_private_key(kit.key.read_bytes(), password=None)
            assert tls.public_key() == certificate.public_key()
            entries = {**roster.sites, **roster.operators}
            assert kit.signing_key().public == entries[name].identity
    server = ServerKit.load(consortium.kits / "server")
    assert serial_text(load_certificate(server.certificate)) == issued.parties["server"].serial
    assert not (consortium.kits / ".staged").exists()


def test_what_was_made_is_consistent(consortium: Consortium) -> None:
    _check_consistent(consortium)
    assert consortium.issued().version == 1


def test_secrets_and_directories_are_their_owner_s_alone(consortium: Consortium) -> None:
    consortium.provision(rotate=["north", "server"])
    for path in [consortium.kits, *consortium.kits.rglob("*")]:
        mode = stat.S_IMODE(path.stat().st_mode)
        if path.is_dir():
            assert mode == 0o700, path
        elif any(word in path.name for word in (".key", ".secret")) or path.name.split(".old-")[0] == "node":
            assert mode == 0o600, path
        elif path.name == "start.sh":
            assert mode == 0o755
        else:
            assert b"PRIVATE" not in path.read_bytes(), path


def test_every_configuration_file_says_what_it_is(consortium: Consortium) -> None:
    for path in consortium.kits.rglob("*"):
        if path.suffix in (".toml", ".service", ".yaml"):
            assert path.read_text().startswith("# "), path
        if path.suffix == ".sh":
            assert path.read_text().splitlines()[1].startswith("# ")


def test_kits_load(consortium: Consortium) -> None:
    site, operator, server = (load_kit(consortium.kit(name)) for name in ("south", "olga", "server"))
    assert isinstance(site, SiteKit) and isinstance(operator, OperatorKit) and isinstance(server, ServerKit)
    assert (site.name, site.server_host, site.server_port, site.supernode_user) == ("south", "127.0.0.1", 9443, "")
    assert {site.link_port, site.node_port}.isdisjoint(
        {(north := SiteKit.load(consortium.kit("north"))).link_port, north.node_port}
    )
    assert operator.server == "127.0.0.1:9443" and (server.host, server.port) == ("127.0.0.1", 9443)
    assert len(site.superexec_secret.read_bytes()) == 32


@pytest.mark.parametrize(
    "line",
    ['folder = "/"', "colour = 1", 'supernode_user = "a b"', 'supernode_user = "-x"', "link_port = 0", "[extra]"],
)
def test_a_kit_s_file_is_read_strictly(consortium: Consortium, line: str) -> None:
    path = consortium.kit("north") / "federation.toml"
    path.write_text(path.read_text().replace("link_port = 9500", "") + line + "\n")
    with pytest.raises(UsageError, match=r"federation\.toml"):
        load_kit(path.parent)


def test_a_kit_of_another_consortium_s_roster_is_refused(consortium: Consortium, tmp_path: Path) -> None:
    other = Consortium(tmp_path / "other")
    other.provision()
    kit = SiteKit.load(consortium.kit("north"))
    kit.roster.write_bytes((other.kit("north") / "roster.json").read_bytes())
    with pytest.raises(UsageError, match="not signed by this consortium's authority"):
        kit.load_roster()


def test_again_without_an_edit_changes_no_byte(consortium: Consortium) -> None:
    before = consortium.files()
    done = consortium.provision()
    assert not done.changed and done.version == 1 and consortium.files() == before


def test_adding_parties_leaves_the_others_as_they_are(consortium: Consortium) -> None:
    before = consortium.files()
    consortium.sites, consortium.operators = ("west", *consortium.sites), (*consortium.operators, "otto")
    done = consortium.provision()
    assert (done.issued, done.version) == (("west", "otto"), 2)
    assert all(name.startswith(("sites/west/", "operators/otto/")) for name in _changed(before, consortium.files()))
    assert set(_access(consortium)) == {"north", "south", "west", "olga", "otto"}
    ports = [SiteKit.load(consortium.kit(name)).link_port for name in ("north", "south", "west")]
    assert len(set(ports)) == 3
    _check_consistent(consortium)


def test_a_party_that_left_the_file_stays_until_it_is_revoked(consortium: Consortium) -> None:
    consortium.sites = ("north",)
    before = consortium.files()
    done = consortium.provision()
    assert consortium.files() == before and "--revoke south" in done.remarks[0]
    done = consortium.provision(revoke=["south"])
    assert done.version == 2 and set(_access(consortium)) == {"north", "olga"}
    assert not _changed(before, consortium.files())
    assert "south" not in SiteKit.load(consortium.kit("north")).load_roster().sites
    _check_consistent(consortium)


def test_who_is_revoked_stays_out_until_rotated_back_in(consortium: Consortium) -> None:
    old = _serial(consortium, "south")
    consortium.provision(revoke=["south"])
    done = consortium.provision()
    assert not done.changed and "south" not in _access(consortium) and "revoked" in done.remarks[0]
    consortium.provision(rotate=["south"])
    assert _access(consortium)["south"][0] == _serial(consortium, "south") != old
    assert old in consortium.issued().parties["south"].revoked_serials
    _check_consistent(consortium)


def test_rotation_replaces_keys_keeps_the_old_aside_and_shuts_the_old_certificate_out(consortium: Consortium) -> None:
    before, old = consortium.files(), _serial(consortium, "north")
    mine = consortium.kit("north") / "federation.toml"
    mine.write_text(mine.read_text() + 'supernode_user = "fedplat-node"\n')
    done = consortium.provision(rotate=["north"])
    after = consortium.files()
    assert (done.rotated, done.version) == (("north",), 2)
    for file in ("tls.key", "identity.key", "node", "superexec.secret", "tls.crt"):
        assert after[f"sites/north/{file}"] != before[f"sites/north/{file}"]
        assert after[f"sites/north/{file}.old-{old}"] == before[f"sites/north/{file}"]
    assert SiteKit.load(mine.parent).supernode_user == "fedplat-node"  # what the party wrote stays
    assert all(name.startswith("sites/north/") for name in _changed(before, after))
    assert old not in {serial for serial, _ in _access(consortium).values()}
    _check_consistent(consortium)


def test_a_kit_that_was_handed_over_is_not_made_again(consortium: Consortium, tmp_path: Path) -> None:
    consortium.kit("north").rename(tmp_path / "handed-over")
    consortium.provision()
    assert not (consortium.kits / "sites" / "north").exists() and "north" in _access(consortium)
    consortium.provision(rotate=["north"])
    _check_consistent(consortium)


def test_rotating_who_brought_its_own_keys_makes_a_certificate_and_no_keys(consortium: Consortium) -> None:
    bundle = keygen("west", consortium.folder.parent / "west")
    (consortium.folder / bundle.name).write_bytes(bundle.read_bytes())
    consortium.sites, consortium.public = (*consortium.sites, "west"), ("west",)
    consortium.provision()
    first, identity = _serial(consortium, "west"), consortium.issued().parties["west"].identity
    consortium.provision(rotate=["west"])
    assert _serial(consortium, "west") != first and consortium.issued().parties["west"].identity == identity
    assert not list(consortium.kit("west").glob("*.key*"))
    _check_consistent(consortium)


def test_new_keys_in_the_file_count_only_after_a_rotation(consortium: Consortium) -> None:
    bundle = keygen("north", consortium.folder.parent / "new-north")
    (consortium.folder / bundle.name).write_bytes(bundle.read_bytes())
    consortium.public, before = ("north",), consortium.files()
    done = consortium.provision()
    assert consortium.files() == before and "--rotate north" in done.remarks[0]


def test_the_server_can_be_rotated_and_says_when_it_should_be(consortium: Consortium) -> None:
    old = consortium.issued().parties["server"].serial
    consortium.provision(rotate=["server"])
    assert consortium.issued().parties["server"].serial != old
    assert (consortium.kits / "server" / f"server.key.old-{old}").exists()
    _check_consistent(consortium)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"revoke": ["nobody"]}, "unknown party 'nobody'"),
        ({"revoke": ["server"]}, "unknown party 'server'"),
        ({"rotate": ["sout"]}, "did you mean 'south'"),
        ({"rotate": ["../south"]}, "unknown party"),
        ({"rotate": ["south"], "revoke": ["south"]}, "either --revoke or --rotate"),
        ({"revoke": ["south", "nobody"]}, "unknown party 'nobody'"),
    ],
)
def test_what_makes_no_sense_changes_nothing(consortium: Consortium, changes: dict[str, object], message: str) -> None:
    before = consortium.files()
    with pytest.raises(UsageError, match=message):
        consortium.provision(**changes)
    assert consortium.files() == before


def test_a_name_keeps_its_role(consortium: Consortium) -> None:
    consortium.sites, consortium.operators, before = ("north",), ("olga", "South"), consortium.files()
    with pytest.raises(UsageError, match="'south' was a site"):
        consortium.provision()
    assert consortium.files() == before


def test_two_provisions_at_once_are_refused(consortium: Consortium) -> None:
    with (consortium.kits / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UsageError, match="another `fedplat provision`"):
            consortium.provision()


def _die_at(step: int, consortium: Consortium, **changes: object) -> bool:
    """Provision in a child that dies at its n-th change of the file system; True if it did."""
    child = os.fork()
    if child == 0:
        left = step

        def hook(event: str, arguments: tuple[object, ...]) -> None:
            nonlocal left
            if event in ("os.rename", "os.mkdir", "os.remove", "os.rmdir"):
                left -= 1
                if left < 0:
                    os._exit(9)

        sys.addaudithook(hook)
        try:
            consortium.provision(**changes)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


def test_a_crash_at_any_moment_leaves_a_change_done_or_undone(tmp_path: Path) -> None:
    done = undone = 0
    for step in range(0, 600, STRIDE):
        world = Consortium(tmp_path / str(step), sites=("north", "south"))
        world.provision()
        before = world.files()
        world.sites = ("north", "south", "west")
        died = _die_at(step, world, rotate=["north"], revoke=["south"])
        world.provision()
        _check_consistent(world)
        parties = world.issued().parties
        happened = parties["south"].revoked
        done, undone = done + happened, undone + (not happened)
        rotated = bool(parties["north"].revoked_serials)
        assert rotated == happened
        untouched = [name for name in before if name.startswith(("operators/", "server/server.", "sites/south/"))]
        after = world.files()
        assert all(before[name] == after[name] for name in untouched if Path(name).name not in SHARED)
        if not died:
            break
    assert done and undone and not died
