"""One account of the ledger: its terms, its running totals, and the rule that admits or refuses a charge.

An account belongs to a dataset, a privacy unit and a neighbouring relation; its budget is a Rényi filter with one order
declared before the first charge (Feldman & Zrnic 2021, Lécuyer 2021). RDP at one order adds up, so the totals after an
entry follow from the totals before it: a reservation costs O(1) however long the history.

`advance` is the only place where totals change. The ledger calls it to write an entry, the audit calls it to check one.
Invariant: what is spent within a period never decreases, and never exceeds the capacity in force at that moment.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from dp_accounting import DpEvent

from fedplat.errors import UsageError
from fedplat.privacy_section import Relation, Unit
from privacy.renyi_filter import RenyiBudget

Purpose = Literal["train", "evaluate", "job"]
Outcome = Literal["released", "failed"]
Tallies = Mapping[str, Mapping[str, int]]
"""A job's releases by purpose: how many, the highest round number, and how many were repeats (`tallied`)."""
DAY_S = 86_400.0
UNLIMITED_ORDER = 8.0
"""Order at which an account without a budget is totalled: only to rank accounts, nothing is enforced."""


@dataclass(frozen=True)
class Budget:
    """What a site allows for one dataset."""

    epsilon: float
    delta: float
    order: float | None = None
    """Pre-declared Rényi order; None: the best for (ε, δ) when the account is opened, that one ever after."""
    period_days: float | None = None
    """The budget is for each period of so many days from the account's opening; None: for ever."""


@dataclass(frozen=True)
class Terms:
    """An account as it is to be opened. `budget` None is unlimited, for simulations; `delta` is then for display."""

    account: str
    dataset: str
    unit: Unit
    relation: Relation
    budget: Budget | None
    delta: float | None = None


@dataclass(frozen=True)
class ReleaseIdentity:
    job: str
    round: int
    attempt: int
    client: str


@dataclass(frozen=True)
class Charge:
    """One release that somebody wants to make. `delta_slack` is an additive δ beyond what the event itself brings."""

    account: str
    identity: ReleaseIdentity
    event: DpEvent
    relation: Relation
    delta_slack: float = 0.0
    purpose: Purpose = "train"
    insecure_noise: bool = False
    note: str = ""
    most_repeats: int | None = None
    """How many of the job's releases with this purpose may be of a round that is not above all before; None: any."""


@dataclass(frozen=True)
class Reservation:
    """The licence to compute: durable in the ledger, and spent whatever happens next."""

    token: str
    seq: int
    account: str
    digest: str
    """SHA-256 of the event's canonical JSON."""
    outcome: Outcome | None = None
    """Set when a whole job's reservation was found again and had been committed already."""


class BudgetExceeded(UsageError):
    """Refused before anything was computed. All numbers are ε at the account's δ and order."""

    def __init__(self, account: str, asked: float, left: float, budget: float, reason: str) -> None:
        super().__init__(f"{account}: {reason}")
        self.account, self.asked, self.left, self.budget = account, asked, left, budget


@dataclass(frozen=True)
class Refusal:
    """One charge of many that was refused; the others stand."""

    account: str
    error: BudgetExceeded

    @property
    def reason(self) -> str:
        return str(self.error)


@dataclass(frozen=True)
class Totals:
    """What the entries of an account add up to. Stored in every entry, checked by the audit."""

    window: int = 0
    rdp: float = 0.0
    """Reserved and committed in this window, at the account's order."""
    slack: float = 0.0
    committed: float = 0.0
    """The part of `rdp` whose reservations were committed."""
    releases: int = 0
    """Since the account was opened, as `insecure`."""
    insecure: int = 0
    job: str = ""
    """The last job that was charged."""
    tallies: Tallies = field(default_factory=dict)
    """What that job has had so far."""
    budget: int = 0
    """Number of the budget entry in force."""

    def as_json(self) -> dict[str, Any]:
        return dict(vars(self))


@dataclass(frozen=True)
class Book:
    """An account's terms in force and its totals."""

    account: str
    dataset: str
    unit: Unit
    relation: Relation
    opened: float
    """Seconds since the epoch."""
    epsilon: float | None = None
    delta: float = 0.0
    order: float = UNLIMITED_ORDER
    period_days: float | None = None
    totals: Totals = Totals()

    @property
    def filter(self) -> RenyiBudget | None:
        return None if self.epsilon is None else RenyiBudget(self.epsilon, self.delta, self.order)

    def window_at(self, time: float) -> int:
        """A clock that is set back does not reopen an old window."""
        if self.period_days is None:
            return 0
        return max(self.totals.window, math.floor((time - self.opened) / (self.period_days * DAY_S)))

    def period_ends(self, time: float) -> float | None:
        if self.period_days is None:
            return None
        return self.opened + (self.window_at(time) + 1) * self.period_days * DAY_S

    def at(self, time: float) -> "Book":
        """The book in the window of that moment: a new window starts with nothing spent."""
        window = self.window_at(time)
        if window == self.totals.window:
            return self
        return replace(self, totals=replace(self.totals, window=window, rdp=0.0, slack=0.0, committed=0.0))


def add_up(total: float, part: float) -> float:
    """Their sum, rounded up: a long history must not gain from rounding."""
    return total if part == 0 else math.nextafter(total + part, math.inf)


def advance(book: Book | None, account: str, kind: str, body: Mapping[str, Any], number: int, time: float) -> Book:
    """The account after one more entry. Raises ValueError for an entry that can't follow."""
    if kind == "genesis":
        if book is not None or number != 1:
            raise ValueError("a second beginning")
        return Book(account, body["dataset"], body["unit"], body["relation"], opened=time)
    if book is None:
        raise ValueError("no beginning")
    if kind == "budget":
        return _with_budget(book, body, number)
    if book.totals.budget == 0:
        raise ValueError("no budget declared")
    book = book.at(time)
    totals = book.totals
    if kind == "reserve":
        totals = _reserved(totals, body)
    elif kind == "commit":
        if body["window"] == totals.window:
            totals = replace(totals, committed=add_up(totals.committed, body["rdp"]))
    elif kind != "note":
        raise ValueError(f"unknown kind '{kind}'")
    return replace(book, totals=totals)


def _with_budget(book: Book, body: Mapping[str, Any], number: int) -> Book:
    terms = {key: body[key] for key in ("epsilon", "delta", "order", "period_days")}
    if book.totals.releases:  # before the first release nothing was counted on the old terms
        old = {"delta": book.delta, "order": book.order, "period_days": book.period_days}
        changed = [key for key, value in old.items() if terms[key] != value]
        if changed or (book.epsilon is None) != (terms["epsilon"] is None):
            raise ValueError(f"{', '.join(changed) or 'unlimited'} can't change")
    slack = _rescaled_slack(book.totals.slack, book.epsilon, terms["epsilon"])
    return replace(book, **terms, totals=replace(book.totals, budget=number, slack=slack))


def _rescaled_slack(slack: float, old: float | None, new: float | None) -> float:
    """The additive δ of truncation carries a factor 1 + e^ε of the whole budget: it grows when the budget is raised."""
    if slack == 0 or old is None or new is None or new <= old:
        return slack
    growth = (1 + math.exp(min(new, 700.0))) / (1 + math.exp(min(old, 700.0)))
    return math.nextafter(slack * growth, math.inf)


def tallied(earlier: Tallies, purpose: str, number: int) -> Tallies:
    """The tallies after one more release, of this round. A round that is not above all before is a repeat."""
    before = earlier.get(purpose)
    if before is None:
        return {**earlier, purpose: {"releases": 1, "highest": number, "repeats": 0}}
    after = {
        "releases": before["releases"] + 1,
        "highest": max(before["highest"], number),
        "repeats": before["repeats"] + (number <= before["highest"]),
    }
    return {**earlier, purpose: after}


def _reserved(totals: Totals, body: Mapping[str, Any]) -> Totals:
    identity = body["identity"]
    return replace(
        totals,
        rdp=add_up(totals.rdp, body["rdp"]),
        slack=add_up(totals.slack, body["slack"]),
        releases=totals.releases + 1,
        insecure=totals.insecure + bool(body["insecure_noise"]),
        job=identity["job"],
        tallies=tallied(body["earlier"], body["purpose"], identity["round"]),
    )


def refusal(book: Book, rdp: float, slack: float) -> BudgetExceeded | None:
    """Why this charge can't be admitted now, or None. `book` is in the window of the charge."""
    budget, totals = book.filter, book.totals
    if budget is None:
        return None
    after, slack_after = add_up(totals.rdp, rdp), add_up(totals.slack, slack)
    if budget.admits(after, 0.0, slack_after, 0.0):
        return None
    spent = budget.epsilon_of(totals.rdp)
    left = max(0.0, budget.epsilon - spent)
    if not budget.admits(after, 0.0):
        wanted = budget.epsilon_of(after)
        reason = (
            f"this would bring ε from {spent:.4g} to {wanted:.4g}, over the budget of {budget.epsilon:g} "
            f"(δ = {budget.delta:g}): {left:.4g} is left. Nothing was computed. Ask for more noise or fewer rounds, or "
            "let the site raise epsilon in its own file"
        )
        return BudgetExceeded(book.account, wanted - spent, left, budget.epsilon, reason)
    reason = (
        f"the additional δ of truncated batches ({slack:.3g}) does not fit beside what was spent ({totals.slack:.3g} "
        f"of {budget.slack_capacity:.3g}). Nothing was computed. Raise privacy.max_batch, or leave it out"
    )
    return BudgetExceeded(book.account, 0.0, left, budget.epsilon, reason)
