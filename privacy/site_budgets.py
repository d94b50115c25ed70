"""The site's own file: which datasets it has, and how much privacy each may cost over all jobs.

Nobody but the site writes this file, and nothing that a server or a job says can loosen it. A task belongs to one
dataset, and a task that none lists is not run. The ledger keeps what was declared: ε may be changed here later (the
ledger records it), everything else about a dataset's account stays as it was.
"""

import os
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, StrictBool, StrictFloat, ValidationError, model_validator

from fedplat.errors import UsageError
from fedplat.job_errors import describe_errors
from fedplat.job_sections import Positive, Section
from fedplat.privacy_section import Relation, Unit
from privacy.site_policy import POLICY_TEMPLATE, PolicySection

if TYPE_CHECKING:  # the ledger takes a second to load, and a node without a site file needs none
    from privacy.ledger import Balance, Ledger, Terms

NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
ENVIRONMENT = "FEDPLAT_SITE"
TEMPLATE = """\
# What this site allows. Only the site writes this file; `fedplat budget` shows what was spent.

[site]
name = "{name}"
ledger = "ledger.sqlite"          # relative to this file; made by: fedplat budget --init
# counter = "/other-disk/ledger.counter"   # tells an old copy of the ledger; best on another disk than its backups

[datasets.digits]                 # one table per dataset
tasks = ["digits"]                # the job's task.name values that read it; a task belongs to one dataset
# dir = "data"                    # where its files are, relative to this file; default: $FEDPLAT_DATA
unit = "sample"                   # what is protected: one example; or "client": all that this site holds
relation = "add-remove"           # or "zero-out" (the number of examples is public), "replace-one"
epsilon = 8.0                     # over all jobs; may be changed later, and the ledger records it
delta = 1e-6                      # well below 1 / number of examples
# order = 6.0                     # Rényi order of the filter; default: the best for (epsilon, delta)
# period_days = 365               # the budget is for each period; without, for ever
# allow_non_private = true        # also serve jobs without [privacy]: they spend nothing and protect nothing
# share = "partition"             # the files are everybody's, this site takes its part (demonstrations only)
""" + POLICY_TEMPLATE.replace("{", "{{").replace("}", "}}")


class SiteSection(Section):
    """Who this site is and where its ledger is."""

    name: str = Field(pattern=NAME)
    """Name of the site; a ledger of another site is refused."""
    ledger: str = "ledger.sqlite"
    """The ledger, relative to this file."""
    counter: str | None = None
    """The ledger's counter, relative to this file; default: beside the ledger. Best on another disk."""


class DatasetSection(Section):
    """One dataset and its budget."""

    tasks: tuple[str, ...] = Field(min_length=1)
    """The job's task.name values that read this dataset."""
    dir: str | None = None
    """Directory of its files, relative to this file; default: $FEDPLAT_DATA. A job can't name another."""
    unit: Unit = "sample"
    """What is protected: one example, or all that this site holds."""
    relation: Relation = "add-remove"
    """What neighbouring datasets are."""
    epsilon: Positive
    """Budget over all jobs."""
    delta: StrictFloat = Field(gt=0, lt=1)
    """δ of the budget."""
    order: StrictFloat | None = Field(None, ge=2)
    """Pre-declared Rényi order; default: the best for (epsilon, delta)."""
    period_days: Positive | None = None
    """Length of a budget period; default: for ever."""
    allow_non_private: StrictBool = False
    """Also serve jobs without [privacy]. What they release is bounded by no budget."""
    share: Literal["whole", "partition"] = "whole"
    """The files are this site's own, or everybody's, of which it takes its part as a simulation would."""


class SiteFile(Section):
    site: SiteSection
    policy: PolicySection = PolicySection()
    datasets: dict[Annotated[str, Field(pattern=NAME)], DatasetSection] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _one_dataset_per_task(self) -> "SiteFile":
        """Two budgets for the same data would be spent side by side, also under two units: what is released about all
        that a site holds is released about each of its examples."""
        taken: dict[str, str] = {}
        for name, dataset in self.datasets.items():
            for task in dataset.tasks:
                other = taken.setdefault(task, name)
                if other != name:
                    raise ValueError(
                        f"datasets.{other} and datasets.{name} both claim task '{task}'. One dataset has one budget: "
                        "keep one of them"
                    )
        return self


@dataclass(frozen=True)
class Site:
    """A site's file with its paths resolved."""

    path: Path
    name: str
    ledger: Path
    counter: Path
    datasets: dict[str, DatasetSection]
    policy: PolicySection = field(default_factory=PolicySection)

    def terms(self) -> "list[Terms]":
        from privacy.ledger import Budget, Terms

        return [
            Terms(
                account_name(name, data.unit),
                name,
                data.unit,
                data.relation,
                Budget(data.epsilon, data.delta, data.order, data.period_days),
            )
            for name, data in self.datasets.items()
        ]


def account_name(dataset: str, unit: Unit) -> str:
    return f"{dataset}/{unit}"


def load_site(path: Path) -> Site:
    from privacy.ledger_creation import default_counter

    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"{path}: no such site file. Write one with: fedplat budget --init --site {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: can't be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path}: not valid TOML: {error}") from None
    try:
        file = SiteFile.model_validate(table)
    except ValidationError as error:
        raise UsageError(f"{path}: {describe_errors(error, SiteFile)}") from None
    ledger = path.parent / file.site.ledger
    counter = path.parent / file.site.counter if file.site.counter else default_counter(ledger)
    return Site(path, file.site.name, ledger, counter, file.datasets, file.policy)


def site_from_environment() -> Site | None:
    """The site that `$FEDPLAT_SITE` names, if it names one."""
    named = os.environ.get(ENVIRONMENT)
    return load_site(Path(named)) if named else None


def dataset_for(site: Site, task_name: str) -> str:
    """The dataset that a task reads. A task that the site did not list is none of its own, and is not run."""
    for name, data in site.datasets.items():
        if task_name in data.tasks:
            return name
    raise UsageError(
        f"{site.path}: no dataset of site '{site.name}' lists the task '{task_name}'. Add it to the tasks of one, "
        "with a budget"
    )


def account_for(site: Site, task_name: str, unit: Unit, relation: Relation) -> str:
    """The account that a job on this task has to be charged to."""
    name = dataset_for(site, task_name)
    data = site.datasets[name]
    if data.unit != unit:
        raise UsageError(
            f"{site.path}: site '{site.name}' has no budget for the unit '{unit}' on the task '{task_name}', only for "
            f"'{data.unit}'. The job's privacy.unit must be '{data.unit}'"
        )
    if data.relation != relation:
        raise UsageError(
            f"{site.path}: datasets.{name} is accounted under {data.relation}, the job under {relation}; the two don't "
            f"add up. The job must be accounted under {data.relation}"
        )
    return account_name(name, unit)


_verified: set[tuple[Path, Path]] = set()
"""Ledgers that this process has read as a whole, with their counters."""


def open_site_ledger(site: Site) -> "Ledger":
    """The site's ledger, its accounts in line with the file.

    The first time in a process all of it is verified. Later openings check its head against the counter and the entries
    that they read: an old entry that is edited meanwhile is found by the next process, or by `fedplat budget --verify`.
    """
    from privacy.ledger import Ledger

    files = (site.ledger.resolve(), site.counter.resolve())
    ledger = Ledger.open(site.ledger, site.name, counter=site.counter, verify=files not in _verified)
    _verified.add(files)
    try:
        ledger.open_accounts(site.terms())
    except BaseException:
        ledger.close()
        raise
    return ledger


def create_site_ledger(site: Site) -> None:
    """Make the site's ledger. Its accounts are opened by `open_site_ledger`, when the file is as the site wants it."""
    from privacy.ledger import Ledger

    site.ledger.parent.mkdir(parents=True, exist_ok=True)
    Ledger.create(site.ledger, site.name, counter=site.counter).close()


def site_balances(site: Site, ledger: "Ledger") -> "list[Balance]":
    """All accounts of the ledger, and those of the file that are not opened yet."""
    from privacy.ledger import unopened_balance

    opened = ledger.balances()
    names = {balance.account for balance in opened}
    return opened + [unopened_balance(terms) for terms in site.terms() if terms.account not in names]
