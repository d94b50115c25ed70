"""The doctor: healthy kits pass, and each thing that can be wrong is found by name."""

import datetime
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from fedplat.consortium import doctor
from fedplat.consortium.doctor import Finding, examine
from fedplat.consortium.kit_files import ServerKit, SiteKit, load_kit
from tests.consortium.conftest import Consortium
from tests.consortium.front_server import NGINX, free_port, front, upstream

NOBODY = "nobody"


def _of(findings: list[Finding], what: str) -> list[str]:
    return [finding.level for finding in findings if finding.what == what]


def _look(consortium: Consortium, name: str, **options: object) -> list[Finding]:
    return examine(load_kit(consortium.kit(name)), offline=True, same_user=True, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["north", "olga", "server"])
def test_a_new_kit_is_healthy(consortium: Consortium, name: str) -> None:
    findings = [f for f in _look(consortium, name) if f.what not in ("isolation", "nginx")]
    assert {finding.level for finding in findings} == {"ok"}


def _swap(file: str) -> Callable[[Consortium], None]:
    def spoil(consortium: Consortium) -> None:
        content = (consortium.kit("south") / file).read_bytes()
        (consortium.kit("north") / file).write_bytes(content)

    return spoil


def _foreign_ca(consortium: Consortium) -> None:
    other = Consortium(consortium.folder.parent / "other")
    other.provision()
    (consortium.kit("north") / "ca.crt").write_bytes((other.kit("north") / "ca.crt").read_bytes())


SPOILED: list[tuple[str, Callable[[Consortium], object], str]] = [
    ("open key", lambda c: (c.kit("north") / "tls.key").chmod(0o640), "permissions"),
    ("open identity", lambda c: (c.kit("north") / "identity.key").chmod(0o604), "permissions"),
    ("open directory", lambda c: c.kit("north").chmod(0o770), "permissions"),
    ("no node key", lambda c: (c.kit("north") / "node").unlink(), "permissions"),
    ("another's TLS key", _swap("tls.key"), "key"),
    ("no key at all", lambda c: (c.kit("north") / "tls.key").write_text("x"), "key"),
    ("another's identity", _swap("identity.key"), "identity"),
    ("another's node key", _swap("node"), "identity"),
    ("another CA", _foreign_ca, "chain"),
    ("no roster", lambda c: (c.kit("north") / "roster.json").unlink(), "roster"),
    ("forged roster", lambda c: _forge(c.kit("north") / "roster.json"), "roster"),
    ("revoked", lambda c: c.provision(revoke=["north"]), "identity"),
    ("no certificate", lambda c: (c.kit("north") / "tls.crt").unlink(), "certificate"),
]


def _forge(path: Path) -> None:
    path.write_text(path.read_text().replace('"version": 1', '"version": 2'))


@pytest.mark.parametrize(("spoil", "found"), [case[1:] for case in SPOILED], ids=[case[0] for case in SPOILED])
def test_each_fault_is_found_under_its_name(
    consortium: Consortium, spoil: Callable[[Consortium], object], found: str
) -> None:
    spoil(consortium)
    assert "fail" in _of(_look(consortium, "north"), found)


@pytest.mark.parametrize(
    ("days_left", "level"), [(31, "ok"), (29, "warning"), (1, "warning"), (-1, "fail"), (400, "fail")]
)
def test_a_certificate_is_judged_by_its_days(consortium: Consortium, days_left: int, level: str) -> None:
    kit = load_kit(consortium.kit("north"))
    end = datetime.datetime.fromisoformat(consortium.issued().parties["north"].expires)
    findings = list(doctor.certificate(kit, end - datetime.timedelta(days=days_left)))
    assert _of(findings, "certificate") == [level]


@pytest.mark.parametrize(
    ("ahead_s", "level"),
    [(0, "ok"), (4, "ok"), (-6, "warning"), (239, "warning"), (241, "fail"), (-300, "fail"), (None, "warning")],
)
def test_clocks_are_judged_by_their_distance(ahead_s: float | None, level: str) -> None:
    assert doctor.clock(ahead_s).level == level


def test_a_supernode_of_the_agent_s_user_fails_unless_that_is_accepted(consortium: Consortium) -> None:
    kit = load_kit(consortium.kit("north"))
    assert _of(examine(kit, offline=True), "isolation") == ["fail"]
    assert _of(examine(kit, offline=True, same_user=True), "isolation") == ["warning"]


@pytest.fixture
def isolated(consortium: Consortium) -> SiteKit:
    path = consortium.kit("north") / "federation.toml"
    path.write_text(path.read_text() + f'supernode_user = "{NOBODY}"\n')
    return SiteKit.load(path.parent)


def test_another_user_that_can_t_read_is_well(isolated: SiteKit) -> None:
    ledger = isolated.folder / "ledger.sqlite"
    ledger.touch()
    assert _of(list(doctor.isolation(isolated, [ledger], False)), "isolation") == ["ok"]


def test_data_within_reach_of_the_supernode_fails(isolated: SiteKit) -> None:
    data = Path("/usr")  # readable by everybody
    findings = list(doctor.isolation(isolated, [data], False))
    assert [f.level for f in findings] == ["fail"] and "can read /usr" in findings[0].detail


def test_a_user_who_is_not_there_fails(isolated: SiteKit) -> None:
    kit = isolated.model_copy(update={"supernode_user": "no-such-user"})
    assert _of(examine(kit, offline=True), "isolation") == ["fail"]


def test_looking_changes_nothing(consortium: Consortium) -> None:
    before = consortium.files()
    for name in ("north", "olga", "server"):
        _look(consortium, name)
    assert consortium.files() == before


@pytest.mark.skipif(NGINX is None, reason="nginx is not installed: apt-get install nginx-light")
def test_the_server_is_asked_who_we_are_to_it(tmp_path: Path) -> None:
    world = Consortium(tmp_path / "alpha", port=free_port())
    world.provision()
    path = world.kits / "server" / "server.toml"
    path.write_text(path.read_text().replace("9444", str(free_port())))
    server = ServerKit.load(path.parent)
    site, operator, revoked = (load_kit(world.kit(name)) for name in ("north", "olga", "south"))
    assert _of(list(doctor.reachability(site)), "server") == ["fail"]  # not started yet
    assert _of(list(doctor.reachability(server)), "server") == ["warning"]
    world.provision(revoke=["south"])
    other = Consortium(tmp_path / "beta", port=world.port)
    other.provision()
    with upstream(server) as seen, front(server):
        for kit in (site, operator, server):
            findings = list(doctor.reachability(kit))
            assert _of(findings, "server") == ["ok"] and _of(findings, "clock") == ["ok"]
        assert _of(list(doctor.reachability(revoked)), "server") == ["fail"]
        assert _of(list(doctor.reachability(load_kit(other.kit("north")))), "server") == ["fail"]
        assert not seen.paths  # nothing of this reached the SuperLink


def test_the_kit_s_secrets_are_what_the_doctor_looks_at(consortium: Consortium) -> None:
    """Every file of mode 0600 is on the list, so that a new secret can't be forgotten."""
    for name in ("north", "olga", "server"):
        kit = load_kit(consortium.kit(name))
        with_secrets = {f.name for f in kit.folder.iterdir() if f.is_file() and _private(f)}
        assert with_secrets == set(kit.SECRETS)


def _private(path: Path) -> bool:
    return stat.S_IMODE(path.stat().st_mode) == 0o600
