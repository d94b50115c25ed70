"""consortium.toml: what is refused, and what the person reads."""

from pathlib import Path

import pytest

from fedplat.consortium.spec import TEMPLATE, load_spec
from fedplat.errors import UsageError

GOOD = '[consortium]\nname = "alpha"\n[server]\nhost = "fl.example.org"\n[[sites]]\nname = "north"\n'


def _load(folder: Path, text: str):  # type: ignore[no-untyped-def]
    path = folder / "consortium.toml"
    path.write_text(text)
    return load_spec(path)


def test_the_template_is_a_consortium(tmp_path: Path) -> None:
    spec = _load(tmp_path, TEMPLATE)
    assert list(spec.parties()) == ["site-1", "site-2", "operator-1"]
    assert (spec.server.port, spec.consortium.valid_days) == (9443, 365)


def test_bundles_are_found_beside_the_file(tmp_path: Path) -> None:
    spec = _load(tmp_path, GOOD + 'public = "keys/north.public.json"\n')
    assert spec.sites[0].public == str(tmp_path / "keys/north.public.json")


HOSTILE = [
    "..", ".", "", "a/b", "../../etc", "/etc", "a b", "-rf", "a\\u0000b", "a\\nb", "a.b", "é", "x" * 64, "a;b", "$(x)",
]  # fmt: skip


@pytest.mark.parametrize("kind", ["sites", "operators"])
@pytest.mark.parametrize("name", HOSTILE)
def test_a_name_that_is_more_than_a_name_is_refused(tmp_path: Path, kind: str, name: str) -> None:
    with pytest.raises(UsageError, match=rf"consortium.toml: {kind}.\d+.name"):
        _load(tmp_path, f'{GOOD}[[{kind}]]\nname = "{name}"\n')


@pytest.mark.parametrize("name", HOSTILE)
def test_so_is_a_consortium_s(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match=r"consortium\.name"):
        _load(tmp_path, GOOD.replace("alpha", name))


@pytest.mark.parametrize("kind", ["sites", "operators"])
@pytest.mark.parametrize("name", ["north", "North", "NORTH"])
def test_names_are_unique_across_all_parties_on_any_file_system(tmp_path: Path, kind: str, name: str) -> None:
    with pytest.raises(UsageError, match="every party needs a name of its own"):
        _load(tmp_path, f'{GOOD}[[{kind}]]\nname = "{name}"\n')


@pytest.mark.parametrize("name", ["server", "Authority"])
def test_the_names_of_fedplat_s_own_kits_are_reserved(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="reserved"):
        _load(tmp_path, GOOD.replace("north", name))


@pytest.mark.parametrize(
    "host", ["https://x.org", "x.org:80", "a b", "", "*.x.org", "x_y", "-x.org", "a..b", "x;y", "x\\ny"]
)
def test_a_host_is_a_name_or_an_address(tmp_path: Path, host: str) -> None:
    with pytest.raises(UsageError, match=r"server\.host"):
        _load(tmp_path, GOOD.replace("fl.example.org", host))


@pytest.mark.parametrize("host", ["localhost", "10.0.0.1", "::1", "a-b.c.example"])
def test_names_and_addresses_are_hosts(tmp_path: Path, host: str) -> None:
    assert _load(tmp_path, GOOD.replace("fl.example.org", host)).server.host == host


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (GOOD + "colour = 1\n", "unknown key 'sites.0.colour'"),
        (GOOD.replace("[server]", "[server]\nprot = 1"), "did you mean 'server.port'"),
        (GOOD.replace("[server]", "[server]\nport = 70000"), "server.port must be ≤ 65535"),
        (GOOD.replace("[server]", '[server]\nport = "1"'), "server.port"),
        (GOOD + "[extra]\n", "unknown key 'extra'"),
        ("[consortium]\n", "consortium.name"),
        ("name = ", "not valid TOML"),
    ],
)
def test_a_mistake_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        _load(tmp_path, text)


def test_no_file_says_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="fedplat provision --init"):
        load_spec(tmp_path / "none.toml")
