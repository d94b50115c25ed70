"""`fedplat budget --person`: what somebody has lost who is in several datasets of a site."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from fedplat.errors import UsageError, unknown_name

if TYPE_CHECKING:
    from privacy.ledger import Balance, Ledger


@dataclass(frozen=True)
class PersonBound:
    """Two bounds on what was spent, at the same δ, and what can ever be."""

    datasets: list[str]
    relation: str
    delta: float
    """All accounts' δ added up."""
    spent: float
    """All accounts' running ε added up: holds for jobs chosen one after the other."""
    composed: float | None
    """ε of all releases as one schedule: what they would cost had they been fixed in advance."""
    budget: float | None
    """What it can be at most (in each period, where an account has periods); None without budgets."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def in_words(self) -> str:
        most = f", at most {self.budget:.3f} when all budgets are spent" if self.budget is not None else ""
        fixed = f" (ε = {self.composed:.3f} had all jobs been fixed in advance)" if self.composed is not None else ""
        return (
            f"one person in {' and '.join(self.datasets)}: ε = {self.spent:.3f}{most}, δ = {self.delta:g}, "
            f"{self.relation}{fixed}"
        )


def person_bound(ledger: "Ledger", datasets: Sequence[str], balances: Sequence["Balance"]) -> PersonBound:
    """The bound for one person in all these datasets: nobody is protected twice by being counted twice."""
    from privacy.accounting import added_up, composed_epsilon

    chosen = _accounts(datasets, balances)
    relations = {balance.relation for balance in chosen}
    if len(relations) > 1:
        raise UsageError(f"--person: {', '.join(sorted(relations))} don't add up. Choose datasets of one relation")
    relation = relations.pop()
    spent, delta = added_up([(balance.spent_epsilon, balance.delta) for balance in chosen])
    known = set(ledger.accounts())
    events = [ledger.spent_event(balance.account) for balance in chosen if balance.account in known]
    left = delta - sum(balance.slack_spent for balance in chosen)
    composed = composed_epsilon(events, left, relation) if 0 < left < 1 else None
    budgets = [balance.epsilon for balance in chosen]
    budget = None if None in budgets else sum(epsilon for epsilon in budgets if epsilon is not None)
    return PersonBound(list(datasets), relation, delta, spent, composed, budget)


def _accounts(datasets: Sequence[str], balances: Sequence["Balance"]) -> "list[Balance]":
    known = {balance.dataset for balance in balances}
    for name in datasets:
        if name not in known:
            raise UsageError(f"--person: {unknown_name('dataset', name, sorted(known))}")
    return [balance for balance in balances if balance.dataset in datasets]
