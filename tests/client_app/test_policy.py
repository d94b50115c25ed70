"""A site's policy: every rule refuses the job that breaks just it, by name, and no job can loosen one."""

import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import pytest

from client_app.policy import (
    CLOCK_SKEW_S,
    DAY_S,
    PolicyRefusal,
    own_client,
    require_allowed,
    require_hours,
    require_strength,
)
from fedplat.consortium.identity import SigningKey
from fedplat.consortium.roster import OperatorEntry, Roster
from fedplat.consortium.signed_job import SignedJob
from fedplat.errors import UsageError
from fedplat.job import Job
from privacy import plan_of
from privacy.site_budgets import Site, load_site
from privacy.site_policy import PolicySection

NOW = 1_800_000_000.0
SITES = ("north", "south", "west")
OLGA = SigningKey.generate()
ROSTER = Roster(
    consortium="alpha", version=1, issued="now", sites={}, operators={"olga": OperatorEntry(identity=OLGA.public)}
)
HONEST = """
signers = ["olga"]
min_cohort = 2
max_rounds = 10
max_steps = 50
max_evaluations = 5
max_epsilon_per_job = 3.0
min_noise_multiplier = 0.5
max_job_age_days = 2.0
hours = "20:00-06:00"
"""
PRIVATE = {
    "privacy__unit": "sample",
    "privacy__noise_multiplier": 2.0,
    "privacy__sample_rate": 0.1,
    "privacy__delta": 1e-6,
}
NIGHT, NOON = datetime(2026, 3, 1, 23, 30), datetime(2026, 3, 1, 12, 0)


@pytest.fixture
def site_with(tmp_path: Path) -> Callable[..., Site]:
    def make(policy: str = HONEST, dataset: str = "allow_non_private = true", name: str = "north") -> Site:
        terms = f"tasks = ['digits']\nepsilon = 8.0\ndelta = 1e-5\n{dataset}\n"
        file = tmp_path / "site.toml"
        file.write_text(f"[site]\nname = '{name}'\n[policy]\n{policy}\n[datasets.digits]\n{terms}")
        return load_site(file)

    return make


@pytest.fixture
def job_with(tiny_job) -> Callable[..., Job]:
    def make(**settings: object) -> Job:
        cohort = {"clients": len(SITES), "fraction": 1.0, "min_replies": 2, "sites": list(SITES)}
        return tiny_job(**({f"cohort__{key}": value for key, value in cohort.items()} | settings))

    return make


def signed(job: Job, at: float = NOW - 60, operator: str = "olga") -> SignedJob:
    return SignedJob.sign(job, "alpha", operator, OLGA, at)


def judge(site: Site, job: Job, at: float = NOW - 60, operator: str = "olga", when: datetime = NIGHT) -> None:
    """Everything that the agent asks the policy, in its order."""
    require_allowed(site, signed(job, at, operator), job, NOW)
    require_strength(site, plan_of(job))
    require_hours(site, when)


@dataclass(frozen=True)
class Case:
    """A job or a moment that breaks one rule of the honest site."""

    rule: str
    says: str
    job: dict[str, object]
    at: float = NOW - 60
    operator: str = "olga"
    when: datetime = NIGHT


EVALUATED = {"evaluation__clients": 1.0, "data__holdout": 0.2}
BROKEN = {
    "not this site": Case("sites", "does not list site 'north'", {"cohort__sites": ["east", "south", "west"]}),
    "another signer": Case("signers", "serves olga, not otto", {}, operator="otto"),
    "signed too long ago": Case("max_job_age_days", "more than 2 days ago", {}, at=NOW - 2 * DAY_S - 1),
    "signed in the future": Case("max_job_age_days", "Check both clocks", {}, at=NOW + CLOCK_SKEW_S + 1),
    "too many rounds": Case("max_rounds", "has 11 rounds, this site allows 10", {"job__rounds": 11}),
    "a mean of one": Case("min_cohort", "may be over 1 sites", {"cohort__min_replies": 1}),
    "a cohort of one": Case("min_cohort", "may be over 1 sites", {"cohort__size": 1, "cohort__min_replies": 1}),
    "noise too weak": Case("min_noise_multiplier", "wants 0.5", PRIVATE | {"privacy__noise_multiplier": 0.4}),
    "epsilon too large": Case("max_epsilon_per_job", "allows 3", PRIVATE | {"privacy__sample_rate": 1.0}),
    "too many steps": Case("max_steps", "has 60 local steps", PRIVATE | {"local__steps": 60}),
    "by day": Case("hours", "works from 20:00-06:00", {}, when=NOON),
}


@pytest.mark.parametrize("case", BROKEN.values(), ids=BROKEN.keys())
def test_the_job_that_breaks_one_rule_is_refused_by_its_name(case, site_with, job_with):
    with pytest.raises(PolicyRefusal, match=rf"^policy\.{case.rule}: .*{case.says}") as refused:
        judge(site_with(), job_with(**case.job), case.at, case.operator, case.when)
    assert refused.value.rule == case.rule and isinstance(refused.value, UsageError)


@pytest.mark.parametrize("settings", [{}, PRIVATE, EVALUATED], ids=["plain", "private", "evaluated"])
def test_an_honest_job_passes_every_rule(settings, site_with, job_with):
    judge(site_with(), job_with(**settings))


@pytest.mark.parametrize("name", BROKEN.keys())
def test_without_rules_of_its_own_a_site_serves_what_they_forbade(name, site_with, job_with):
    """The table breaks the site's rules and nothing else: but for who takes part and the clock, defaults allow it."""
    case = BROKEN[name]
    if case.rule == "sites" or case.at > NOW:
        with pytest.raises(PolicyRefusal):
            judge(site_with(""), job_with(**case.job), case.at, case.operator, case.when)
    else:
        judge(site_with(""), job_with(**case.job), case.at, case.operator, case.when)


def test_every_rule_of_the_file_is_in_the_table_or_judged_elsewhere():
    elsewhere = {
        "max_evaluations",
        "require_secure_aggregation",
        "max_seconds",
        "max_steps",
        "show_budget",
        "witnesses",
    }
    assert set(PolicySection.model_fields) == {case.rule for case in BROKEN.values()} - {"sites"} | elsewhere


def test_secure_aggregation_is_demanded_of_every_job(site_with, job_with):
    site = site_with("require_secure_aggregation = true")
    for settings in ({}, PRIVATE):
        with pytest.raises(PolicyRefusal, match=r"^policy\.require_secure_aggregation"):
            judge(site, job_with(**settings))


def test_a_site_that_releases_no_metrics_says_so_before_anything_is_computed(site_with, job_with):
    site = site_with("max_evaluations = 0")
    judge(site, job_with())
    with pytest.raises(PolicyRefusal, match=r"^policy\.max_evaluations"):
        judge(site, job_with(**EVALUATED))
    judge(site, job_with(**EVALUATED, **PRIVATE, privacy__evaluation_noise=5.0))


def test_plain_jobs_need_the_sites_permission(site_with, job_with):
    site = site_with(dataset="")
    with pytest.raises(UsageError, match="only to private jobs"):
        judge(site, job_with())
    judge(site, job_with(**PRIVATE))


def test_no_signer_is_nobodys_site(site_with, job_with):
    with pytest.raises(PolicyRefusal, match=r"^policy\.signers"):
        judge(site_with("signers = []"), job_with())


@pytest.mark.parametrize("ahead", [0.0, 1.0, CLOCK_SKEW_S])
def test_clocks_may_differ_by_the_skew_and_no_more(ahead, site_with, job_with):
    site, job = site_with(), job_with()
    judge(site, job, NOW + ahead)
    judge(site, job, NOW - 2 * DAY_S)
    with pytest.raises(PolicyRefusal, match=r"max_job_age_days"):
        judge(site, job, NOW + CLOCK_SKEW_S + 0.001 + ahead)


@pytest.mark.parametrize("strange", ["NaN", "Infinity", "-Infinity", "1e999", "true", '"1"', "null"])
def test_no_signing_time_escapes_comparison(strange, job_with):
    """NaN is neither too old nor in the future: it must not get as far as being compared."""
    text = signed(job_with()).text().replace(f"{NOW - 60}", strange)
    assert strange in text
    with pytest.raises(UsageError):
        SignedJob.parse(text).verified(ROSTER)


def test_the_mean_that_counts_is_the_smallest_that_the_job_allows(site_with, job_with):
    """A job that samples all sites may still take a mean of few: min_replies says so."""
    site = site_with("min_cohort = 3")
    judge(site, job_with(cohort__min_replies=3))
    for settings in ({"cohort__min_replies": 2}, {"cohort__size": 2}):
        with pytest.raises(PolicyRefusal, match=r"^policy\.min_cohort"):
            judge(site, job_with(**settings))


# --- nothing in a job loosens a rule ----------------------------------------------------------------


def test_a_job_does_not_lower_its_epsilon_by_a_delta_of_its_own(site_with, job_with):
    """ε means nothing without δ: a claim of little ε at δ = 0.5 is no claim at all."""
    weak = PRIVATE | {"privacy__noise_multiplier": 1.0, "privacy__sample_rate": 0.3}
    assert plan_of(job_with(**weak | {"privacy__delta": 0.5})).epsilon() < 0.1
    for delta in (1e-6, 0.1, 0.5):
        with pytest.raises(PolicyRefusal, match=r"^policy\.max_epsilon_per_job"):
            judge(site_with(), job_with(**weak | {"privacy__delta": delta}))


def test_metrics_need_the_sites_noise_too(site_with, job_with):
    settings = EVALUATED | PRIVATE
    judge(site_with(), job_with(**settings, privacy__evaluation_noise=5.0))
    with pytest.raises(PolicyRefusal, match=r"^policy\.min_noise_multiplier"):
        judge(site_with("min_noise_multiplier = 0.5"), job_with(**settings, privacy__evaluation_noise=0.1))


def test_a_job_has_no_key_that_names_a_rule(job_with, site_with):
    """Policy is not a section of a job, and what is signed has no room for one."""
    job = job_with()
    for rule in PolicySection.model_fields:
        assert f'"{rule}"' not in job.canonical()
    with pytest.raises(UsageError, match="unknown key 'policy'"):
        Job.from_canonical(job.canonical()[:-1] + ',"policy":{"min_cohort":1}}')
    extended = signed(job).text()[:-1] + ',"policy":{}}'
    with pytest.raises(UsageError, match="carries no signed job"):
        SignedJob.parse(extended)


def test_a_sites_client_name_is_its_place_in_the_job(job_with):
    job = job_with(cohort__sites=["south", "north", "west"])
    assert [own_client(job, site) for site in ("south", "north", "west")] == ["client-0", "client-1", "client-2"]
    with pytest.raises(PolicyRefusal, match=r"^policy\.sites"):
        own_client(job, "client-0")


def test_the_sites_own_template_is_the_default_policy():
    from privacy.site_policy import POLICY_TEMPLATE

    assert PolicySection.model_validate(tomllib.loads(POLICY_TEMPLATE)["policy"]) == PolicySection()
