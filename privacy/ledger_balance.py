"""An account at one moment, in the numbers that people ask for: spent, reserved, left.

What the filter proves, for all that is ever admitted, is the budget's ε. The running figure shown here says how much of
it is used; it never exceeds it. An account without a budget (a simulation) shows the PLD accountant's ε of its charges,
which is the claim for one job fixed in advance.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from dp_accounting import ComposedDpEvent, DpEvent, NoOpDpEvent, SelfComposedDpEvent

from fedplat import canonical
from fedplat.privacy_section import Relation, Unit
from privacy.accounting import epsilon
from privacy.events import event_from_json, event_to_json
from privacy.ledger_account import Book, Terms, advance
from privacy.ledger_posting import declaration
from privacy.ledger_store import Transaction


@dataclass(frozen=True)
class Balance:
    """An account at one moment, for people. `spent_epsilon` includes `reserved_epsilon`: a reservation counts fully."""

    account: str
    dataset: str
    unit: Unit
    relation: Relation
    epsilon: float | None
    """The budget; None: unlimited (a simulation), then ε is the PLD accountant's for the charges made."""
    delta: float
    order: float
    spent_epsilon: float
    reserved_epsilon: float | None
    left_epsilon: float | None
    rdp_spent: float
    rdp_capacity: float | None
    slack_spent: float
    releases: int
    insecure_releases: int
    period_days: float | None
    """None: all numbers are for the account's lifetime; else for the current period."""
    period_ends: float | None


def balance_of(book: Book, now: float) -> Balance:
    book = book.at(now)
    totals, budget = book.totals, book.filter
    spent = budget.epsilon_of(totals.rdp) if budget else 0.0
    committed = budget.epsilon_of(min(totals.committed, totals.rdp)) if budget else 0.0
    return Balance(
        account=book.account,
        dataset=book.dataset,
        unit=book.unit,
        relation=book.relation,
        epsilon=book.epsilon,
        delta=book.delta,
        order=book.order,
        spent_epsilon=spent,
        reserved_epsilon=spent - committed if budget else None,
        left_epsilon=max(0.0, budget.epsilon - spent) if budget else None,
        rdp_spent=totals.rdp,
        rdp_capacity=budget.capacity if budget else None,
        slack_spent=totals.slack,
        releases=totals.releases,
        insecure_releases=totals.insecure,
        period_days=book.period_days,
        period_ends=book.period_ends(now),
    )


def read_balance(transaction: Transaction, account: str) -> Balance:
    balance = balance_of(transaction.book(account), time.time())
    if balance.epsilon is not None:
        return balance
    event = canonical.dumps(event_to_json(composed(transaction.event_counts(account, None))))
    spent = _unlimited_epsilon(event, balance.delta - balance.slack_spent, balance.relation)
    return replace(balance, spent_epsilon=spent)


@lru_cache(maxsize=1024)
def _unlimited_epsilon(event: str, delta: float, relation: Relation) -> float:
    """Thousands of simulated clients have few distinct histories."""
    return epsilon(event_from_json(json.loads(event)), delta, relation)


def composed(counts: Sequence[tuple[DpEvent, int]]) -> DpEvent:
    """Events and how often each happened, as one event."""
    parts = [event if count == 1 else SelfComposedDpEvent(event, count) for event, count in counts]
    return ComposedDpEvent(parts) if parts else NoOpDpEvent()


def unopened_balance(terms: Terms) -> Balance:
    """What an account would show if it were opened now."""
    genesis, limits = declaration(terms)
    book = advance(None, terms.account, "genesis", genesis, 1, time.time())
    return balance_of(advance(book, terms.account, "budget", limits, 2, book.opened), book.opened)
