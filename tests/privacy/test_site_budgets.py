"""The site's own file: what it says is what holds; what makes no sense is refused by name."""

import shutil
from pathlib import Path

import pytest

from fedplat.errors import UsageError
from privacy.ledger import BudgetExceeded, Ledger, LedgerTampered
from privacy.site_budgets import (
    TEMPLATE,
    account_for,
    create_site_ledger,
    load_site,
    open_site_ledger,
    site_balances,
    site_from_environment,
)
from tests.privacy.ledgers import ACCOUNT, charge
from tests.privacy.test_ledger_tampering import edit

SITE = """
[site]
name = "hospital"
[datasets.digits]
tasks = ["digits", "cancer"]
epsilon = 8.0
delta = 1e-6
[datasets.patients]
tasks = ["triage"]
unit = "client"
relation = "replace-one"
epsilon = 2.0
delta = 1e-5
period_days = 365
"""


def write(tmp_path: Path, text: str = SITE) -> Path:
    path = tmp_path / "site.toml"
    path.write_text(text)
    return path


def test_the_template_is_a_site(tmp_path):
    site = load_site(write(tmp_path, TEMPLATE.format(name="clinic")))
    assert site.name == "clinic" and site.datasets["digits"].epsilon == 8.0
    assert site.ledger == tmp_path / "ledger.sqlite"


def test_what_the_template_leaves_commented_is_valid_too(tmp_path):
    lines = TEMPLATE.format(name="clinic").splitlines()
    settings = [line.removeprefix("# ") if line.startswith("# ") and " = " in line else line for line in lines]
    site = load_site(write(tmp_path, "\n".join(settings)))
    data = site.datasets["digits"]
    assert site.policy.signers == ("alice",) and not site.policy.require_secure_aggregation
    assert (data.dir, data.order, data.period_days, data.allow_non_private) == ("data", 6.0, 365.0, True)
    plain = load_site(write(tmp_path, TEMPLATE.format(name="clinic"))).datasets["digits"]
    assert (plain.dir, plain.allow_non_private) == (None, False)


def test_a_counter_may_live_elsewhere(tmp_path):
    elsewhere = tmp_path / "disk"
    elsewhere.mkdir()
    site = load_site(
        write(tmp_path, SITE.replace("[datasets.digits]", f'counter = "{elsewhere}/c"\n[datasets.digits]'))
    )
    create_site_ledger(site)
    with open_site_ledger(site) as ledger:
        ledger.reserve(charge())
    assert [file.name for file in elsewhere.iterdir()] == ["c"]
    assert not (tmp_path / "ledger.sqlite.counter").exists()


def test_accounts_are_opened_and_follow_the_file(tmp_path):
    site = load_site(write(tmp_path))
    create_site_ledger(site)
    with Ledger.open(site.ledger) as ledger:  # shown before they are opened, as the file has them
        assert [(b.account, b.epsilon, b.spent_epsilon) for b in site_balances(site, ledger)] == [
            ("digits/sample", 8.0, 0.0),
            ("patients/client", 2.0, 0.0),
        ]
    with open_site_ledger(site) as ledger:
        assert ledger.accounts() == ["digits/sample", "patients/client"]
        ledger.reserve(charge(noise=0.9))
        with pytest.raises(BudgetExceeded):
            ledger.reserve(charge(noise=0.9))
    raised = load_site(write(tmp_path, SITE.replace("epsilon = 8.0", "epsilon = 12.0")))
    with open_site_ledger(raised) as ledger:
        ledger.reserve(charge(noise=0.9))
        assert ledger.balance(ACCOUNT).epsilon == 12.0
        head = ledger.head()
    with open_site_ledger(raised) as ledger:
        assert ledger.head() == head  # opening again writes nothing
    other = load_site(write(tmp_path, SITE.replace("delta = 1e-6", "delta = 1e-7")))
    with pytest.raises(UsageError, match="delta is 1e-06 there, 1e-07 here"):
        open_site_ledger(other)


def test_a_ledger_is_read_as_a_whole_once_per_process_and_its_head_every_time(tmp_path, monkeypatch):
    site, read = load_site(write(tmp_path)), []
    create_site_ledger(site)
    verify = Ledger.verify
    monkeypatch.setattr(Ledger, "verify", lambda ledger: (read.append(ledger.path), verify(ledger))[1])
    for number in range(3):
        with open_site_ledger(site) as ledger:
            ledger.reserve(charge(number))
    assert read == [site.ledger]
    shutil.copy(site.ledger, tmp_path / "old")
    with open_site_ledger(site) as ledger:
        ledger.reserve(charge(4))
    (tmp_path / "old").replace(site.ledger)
    with pytest.raises(LedgerTampered):
        open_site_ledger(site)


def test_a_ledger_that_did_not_verify_is_read_again(tmp_path):
    site = load_site(write(tmp_path))
    create_site_ledger(site)
    with Ledger.open(site.ledger) as ledger:
        ledger.open_accounts(site.terms())
        for number in range(3):
            ledger.reserve(charge(number))
    edit(site.ledger, "UPDATE entries SET time = time + 1 WHERE seq = 4")
    for _ in range(2):
        with pytest.raises(LedgerTampered):
            open_site_ledger(site)


def test_a_ledger_of_another_site_is_refused(tmp_path):
    site = load_site(write(tmp_path))
    create_site_ledger(site)
    renamed = load_site(write(tmp_path, SITE.replace("hospital", "clinic")))
    with pytest.raises(UsageError, match="is the ledger of site 'hospital', not of 'clinic'"):
        open_site_ledger(renamed)


def test_a_job_finds_its_account(tmp_path):
    site = load_site(write(tmp_path))
    assert account_for(site, "cancer", "sample", "add-remove") == "digits/sample"
    assert account_for(site, "triage", "client", "replace-one") == "patients/client"


MISSING = {
    "no dataset": (("mnist", "sample", "add-remove"), "no dataset of site 'hospital' lists the task 'mnist'"),
    "no unit": (("cancer", "client", "add-remove"), "has no budget for the unit 'client' on the task 'cancer'"),
    "no relation": (("digits", "sample", "zero-out"), "datasets.digits is accounted under add-remove"),
}


@pytest.mark.parametrize(("asked", "message"), MISSING.values(), ids=MISSING.keys())
def test_what_is_missing_is_named(asked, message, tmp_path):
    site = load_site(write(tmp_path))
    with pytest.raises(UsageError, match=message):
        account_for(site, *asked)


BAD = {
    "no site": ("", "site: field required"),
    "unknown key": (SITE.replace("unit =", "unti ="), "unknown key 'datasets.patients.unti'"),
    "unknown section": (SITE + "[rules]\n", "unknown key 'rules'"),
    "unknown rule": (SITE + "[policy]\nmin_cohrot = 2\n", "unknown key 'policy.min_cohrot'"),
    "epsilon 0": (SITE.replace("epsilon = 8.0", "epsilon = 0.0"), "datasets.digits.epsilon must be > 0"),
    "epsilon missing": (SITE.replace("epsilon = 8.0", ""), "datasets.digits.epsilon: field required"),
    "delta 1": (SITE.replace("1e-6", "1.0"), "datasets.digits.delta must be < 1"),
    "infinite epsilon": (SITE.replace("epsilon = 8.0", "epsilon = inf"), "datasets.digits.epsilon"),
    "unit": (SITE.replace('"client"', '"person"'), "datasets.patients.unit must be one of"),
    "no tasks": (SITE.replace('["digits", "cancer"]', "[]"), "datasets.digits.tasks"),
    "bad name": (SITE.replace("hospital", "a b"), "site.name"),
    "bad dataset": (SITE.replace("[datasets.digits]", '[datasets."a/b"]'), "a/b"),
    "two budgets for one task": (
        SITE.replace('unit = "client"', "").replace("triage", "digits"),
        "datasets.digits and datasets.patients both claim task 'digits'",
    ),
    "two budgets for one task, by other units": (
        SITE.replace("triage", "cancer"),
        "datasets.digits and datasets.patients both claim task 'cancer'. One dataset has one budget",
    ),
    "order below 2": (SITE.replace("epsilon = 8.0", "epsilon = 8.0\norder = 1.5"), "datasets.digits.order must be ≥ 2"),
    "half a permission": (SITE + 'allow_non_private = "yes"\n', "datasets.patients.allow_non_private"),
    "not TOML": ("[site", "not valid TOML"),
}


@pytest.mark.parametrize(("text", "message"), BAD.values(), ids=BAD.keys())
def test_a_bad_site_file_is_explained(text, message, tmp_path):
    with pytest.raises(UsageError) as refused:
        load_site(write(tmp_path, text))
    assert "site.toml: " in str(refused.value) and message in str(refused.value)


def test_a_budget_too_small_to_use_is_refused_before_anything_is_written(tmp_path):
    site = load_site(write(tmp_path, SITE.replace("epsilon = 2.0", "epsilon = 0.001")))
    create_site_ledger(site)
    with pytest.raises(UsageError, match="too small"):
        open_site_ledger(site)
    with Ledger.open(site.ledger) as ledger:
        assert ledger.accounts() == []


def test_the_environment_names_the_site(tmp_path, monkeypatch):
    monkeypatch.delenv("FEDPLAT_SITE", raising=False)
    assert site_from_environment() is None
    monkeypatch.setenv("FEDPLAT_SITE", str(write(tmp_path)))
    assert site_from_environment().name == "hospital"
    monkeypatch.setenv("FEDPLAT_SITE", str(tmp_path / "none.toml"))
    with pytest.raises(UsageError, match="fedplat budget --init --site"):
        site_from_environment()


def test_another_unit_is_no_second_budget_for_a_dataset(tmp_path):
    path = write(tmp_path)
    create_site_ledger(load_site(path))
    by_client = SITE.replace("epsilon = 8.0", 'unit = "client"\nepsilon = 8.0')
    open_site_ledger(load_site(path)).close()
    path.write_text(by_client)  # nothing was spent: the site may think again
    with open_site_ledger(load_site(path)) as ledger:
        ledger.reserve(charge(account="digits/client"))
    path.write_text(SITE)
    with pytest.raises(UsageError, match=r"'digits' has spent under the unit 'client'.* Put unit = 'client' back"):
        open_site_ledger(load_site(path))
    path.write_text(by_client)
    with open_site_ledger(load_site(path)) as ledger:
        assert ledger.balance("digits/client").releases == 1 and ledger.balance(ACCOUNT).releases == 0
