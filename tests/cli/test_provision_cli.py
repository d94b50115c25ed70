"""`fedplat provision`, `site keygen` and `doctor`, as a person uses them."""

import json
from pathlib import Path

import pytest

from privacy.site_budgets import load_site


def test_from_nothing_to_kits(fedplat, tmp_path: Path) -> None:
    assert "edit it" in fedplat("provision", "--init").out
    done = fedplat("provision", "consortium.toml")
    assert done.code == 0 and "issued: server, site-1, site-2, operator-1" in done.out and "next:" in done.out
    assert load_site(tmp_path / "kits" / "sites" / "site-1" / "site.toml").name == "site-1"
    again = fedplat("provision")
    assert again.code == 0 and "nothing to change" in again.out
    revoked = json.loads(fedplat("provision", "--revoke", "site-2", "--json").out)
    assert (revoked["revoked"], revoked["roster_version"]) == (["site-2"], 2)


def test_keys_made_at_a_site_and_its_kit_make_a_healthy_site(fedplat, tmp_path: Path) -> None:
    fedplat("provision", "--init")
    made = fedplat("site", "keygen", "site-2")
    assert made.code == 0 and "site-2.public.json" in made.out
    path = tmp_path / "consortium.toml"
    path.write_text(path.read_text().replace('"site-2"', '"site-2"\npublic = "site-2/site-2.public.json"'))
    assert fedplat("provision").code == 0
    for file in (tmp_path / "kits" / "sites" / "site-2").iterdir():
        if file.is_file():
            (tmp_path / "site-2" / file.name).write_bytes(file.read_bytes())
    looked = fedplat("doctor", "site-2", "--offline", "--same-user", "--json")
    report = json.loads(looked.out)
    assert looked.code == 0 and report["ok"]
    assert {"warning"} == {f["level"] for f in report["findings"] if f["what"] in ("ledger", "isolation")}


def test_the_doctor_s_exit_code_says_whether_anything_failed(fedplat, tmp_path: Path) -> None:
    fedplat("provision", "--init")
    fedplat("provision")
    kit = tmp_path / "kits" / "sites" / "site-1"
    assert fedplat("doctor", kit, "--offline", "--same-user").code == 0
    failed = fedplat("doctor", kit, "--offline")
    assert failed.code == 1 and "isolation" in failed.out and "useradd" in failed.out
    (kit / "site.toml").write_text('[site]\nname = "other"\n')
    failed = fedplat("doctor", kit, "--offline", "--same-user")
    assert failed.code == 1 and "is the file of site 'other'" in failed.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["provision"], "fedplat provision --init"),
        (["provision", "--init", "there.toml"], "never overwrites"),
        (["site", "keygen", "../x"], "is no name for a party"),
        (["doctor", "."], "not a kit"),
    ],
)
def test_mistakes_are_told_with_exit_code_2(fedplat, tmp_path: Path, arguments: list[str], message: str) -> None:
    (tmp_path / "there.toml").write_text("")
    done = fedplat(*arguments)
    assert done.code == 2 and message in done.err and done.err.startswith("error: ")
    assert [f.name for f in tmp_path.iterdir()] == ["there.toml"]
