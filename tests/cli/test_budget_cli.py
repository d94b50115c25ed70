"""`fedplat budget`: what a person and a script see, and how it ends."""

import json
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from fedplat.cli.budget import budget
from fedplat.errors import FedplatError
from fedplat.job import validate_job
from fedplat.rundir import RunDirectory
from privacy.ledger import Ledger, Terms
from privacy.site_budgets import load_site, open_site_ledger
from tests.cli.conftest import Result
from tests.privacy.ledgers import ACCOUNT, charge, fill


@pytest.fixture
def run(monkeypatch, capsys, tmp_path) -> Callable[..., Result]:
    """The command by itself, with the errors and exit codes of `fedplat.cli.main`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDPLAT_SITE", raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    app = typer.Typer()
    app.command()(budget)

    def call(*arguments: object) -> Result:
        capsys.readouterr()
        code, error = 0, ""
        try:
            app([str(argument) for argument in arguments], standalone_mode=False)
        except FedplatError as raised:
            code, error = raised.exit_code, f"error: {raised}"
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err + error)

    return call


@pytest.fixture
def site(run) -> Path:
    assert run("--init").code == 0 and run("--init").code == 0
    with open_site_ledger(load_site(Path("site.toml"))) as ledger:
        fill(ledger, 3)
        ledger.reserve(charge(3))
    return Path("site.toml")


def test_init_makes_file_and_ledger_and_opens_accounts_once_the_file_is_edited(run):
    first = run("--init")
    assert first.code == 0 and "wrote site.toml" in first.out and "made ledger.sqlite" in first.out
    with Ledger.open(Path("ledger.sqlite")) as ledger:
        assert ledger.accounts() == []  # the file is a draft
    text = Path("site.toml").read_text().replace("delta = 1e-6", "delta = 1e-7")
    Path("site.toml").write_text(text)
    assert "accounts are as site.toml says" in run("--init").out
    assert Path("site.toml").read_text() == text
    assert json.loads(run("--json").out)["accounts"][0]["delta"] == 1e-7


def test_json_contract(run, site):
    result = run("--json")
    (account,) = (content := json.loads(result.out))["accounts"]
    assert content["site"] and content["ledger"] == "ledger.sqlite" and len(content["head"]["hash"]) == 64
    assert {"account", "dataset", "unit", "relation", "epsilon", "delta", "spent", "reserved", "left"} <= set(account)
    assert account["account"] == ACCOUNT and account["releases"] == 4 and account["period_days"] is None
    assert account["spent"] + account["left"] == pytest.approx(account["epsilon"]) and account["reserved"] > 0


def test_a_table_for_people(run, site):
    out = run().out
    for word in ("digits/sample", "add-remove", "8.000", "lifetime", "█", "░"):
        assert word in out


def test_a_changed_file_is_pointed_out_and_applied_by_init(run, site):
    site.write_text(site.read_text().replace("epsilon = 8.0", "epsilon = 9.0"))
    assert "site.toml says ε = 9 for digits/sample" in run().out
    run("--init")
    assert json.loads(run("--json").out)["accounts"][0]["epsilon"] == 9.0


def test_history_shows_every_entry_and_no_token(run, site):
    out = run("--history", ACCOUNT).out
    assert "train: job job, round 3" in out and "released" in out and "order" in out
    result = run("--history", ACCOUNT, "--json").out
    entries = json.loads(result)["entries"]
    assert [entry["kind"] for entry in entries][:3] == ["genesis", "budget", "reserve"] and "token" not in result


def test_verify_passes_and_fails(run, site):
    assert "verified: " in run("--verify").out
    connection = sqlite3.connect("ledger.sqlite")
    connection.execute("DROP TRIGGER entries_no_update")
    connection.execute("UPDATE entries SET time = 0 WHERE seq = 4")
    connection.execute(
        "CREATE TRIGGER entries_no_update BEFORE UPDATE ON entries "
        "BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END"
    )
    connection.commit()
    connection.close()
    result = run("--verify")
    assert result.code == 1 and "entry 4 (account 'digits/sample') was changed" in result.err


def test_any_ledger_and_the_environment(run, site, monkeypatch):
    assert json.loads(run("--ledger", "ledger.sqlite", "--json").out)["accounts"][0]["releases"] == 4
    monkeypatch.setenv("FEDPLAT_SITE", str(site.resolve()))
    monkeypatch.chdir(site.resolve().parent.parent)
    assert json.loads(run("--json").out)["accounts"][0]["releases"] == 4


def test_a_simulated_run_shows_the_ten_that_spent_most(run):
    directory = RunDirectory.create(Path("run"), validate_job({}, "job"))
    with Ledger.create(directory.path / "ledger.sqlite", "simulation") as ledger:
        names = [f"client-{i}/sample" for i in range(15)]
        ledger.open_accounts([Terms(name, name, "sample", "add-remove", None, 1e-5) for name in names])
        for number in range(3):
            ledger.commit(ledger.reserve_all([charge(number, account=name) for name in names[: 5 * (number + 1)]]))
    rows = json.loads(run("--run", "./run", "--json").out)["accounts"]
    assert [row["releases"] for row in rows] == [3] * 5 + [2] * 5
    assert rows[0]["spent"] > rows[-1]["spent"] > 0 and rows[0]["left"] is None
    assert "a simulation has no budget" in run("--run", "./run").out


CASES = {
    "no site": ([], "site.toml: no such site file. Write one with: fedplat budget --init"),
    "two sources": (["--site", "a", "--ledger", "b"], "give one of --site, --ledger, --run"),
    "init of a run": (["--init", "--run", "latest"], "--init makes the ledger that a site's file names"),
    "no such run": (["--run", "nothing"], "no such run"),
    "no ledger": (["--ledger", "none.sqlite"], "no ledger there"),
    "not private": (["--run", "./run"], "this run has no ledger: it was not private"),
}


@pytest.mark.parametrize(("arguments", "message"), CASES.values(), ids=CASES.keys())
def test_bad_input_is_explained(arguments, message, run):
    RunDirectory.create(Path("run"), validate_job({}, "job"))
    result = run(*arguments)
    assert result.code == 2 and message in result.err


def test_unknown_account(run, site):
    result = run("--history", "digit/sample")
    assert result.code == 2 and "did you mean 'digits/sample'?" in result.err


def test_init_does_not_replace_a_lost_ledger(run, site):
    Path("ledger.sqlite").unlink()
    result = run("--init")
    assert result.code == 2 and "a new one would forget what was spent" in result.err
    assert run().code == 1


def test_help_has_examples(run, capsys):
    with pytest.raises(SystemExit):
        typer.main.get_command(_app())(["--help"])
    out = capsys.readouterr().out
    assert "--history digits/sample" in out and "--init" in out


def _app() -> typer.Typer:
    app = typer.Typer(rich_markup_mode="markdown")
    app.command()(budget)
    return app


def two_datasets(relation: str = "add-remove") -> None:
    """A site whose patients may be in both."""
    text = Path("site.toml").read_text().partition("[policy]")[0]
    wards = f'tasks = ["wards"]\nrelation = "{relation}"\nepsilon = 3.0\ndelta = 1e-5\n'
    Path("site.toml").write_text(f"{text}\n[datasets.wards]\n{wards}")
    with open_site_ledger(load_site(Path("site.toml"))) as ledger:
        ledger.reserve(charge(0, account="wards/sample", noise=8.0, relation=relation))


def test_somebody_in_two_datasets_is_told_the_sum(run, site):
    two_datasets()
    rows = {row["dataset"]: row for row in json.loads(run("--json").out)["accounts"]}
    found = json.loads(run("--person", "digits", "--person", "wards", "--json").out)["person"]
    assert found["spent"] == pytest.approx(rows["digits"]["spent"] + rows["wards"]["spent"])
    assert found["delta"] == pytest.approx(1.1e-5) and found["budget"] == 11.0 and found["relation"] == "add-remove"
    alone = json.loads(run("--person", "digits", "--json").out)["person"]
    assert alone["spent"] == pytest.approx(rows["digits"]["spent"])
    assert 0 < found["composed"] <= found["spent"]
    assert "one person in digits and wards: ε = " in run("--person", "digits", "--person", "wards").out


def test_what_does_not_add_up_is_not_added_up(run, site):
    two_datasets("replace-one")
    assert "add-remove, replace-one don't add up" in run("--person", "digits", "--person", "wards").err
    assert "unknown dataset 'ward'" in run("--person", "ward").err


def test_a_delta_that_protects_nobody_is_remarked_upon(run, site):
    assert "protects nobody" not in run().out
    site.write_text(site.read_text().replace("delta = 1e-6", "delta = 1e-3"))
    assert "datasets.digits.delta = 0.001 protects nobody among 1000 examples or more" in run().out
