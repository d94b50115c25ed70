"""What this site says of its ledger, and what it has heard of others': see `privacy.ledger_heads`."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedplat.consortium.identity import SigningKey
from fedplat.consortium.roster import Roster
from fedplat.errors import FedplatError, UsageError
from fedplat.job import Job
from privacy.ledger_heads import (
    STATEMENT,
    KnownHeads,
    SignedHead,
    Statement,
    parse_statement,
    require_newest,
    sign_head,
)
from privacy.site_budgets import account_for, open_site_ledger, site_balances

if TYPE_CHECKING:
    from privacy.plan import PrivacyPlan
    from privacy.site_budgets import Site


class NotYet(FedplatError):
    """The site can't answer this request now, and may later."""


class Statements:
    """One site's statements."""

    def __init__(self, site: "Site", key: SigningKey, path: Path) -> None:
        self._site, self._key = site, key
        self._known = KnownHeads(path)
        self._started = time.time()
        self._witnesses: set[str] = set()
        self._check_own()

    def hear(self, told: Sequence[object], roster: Roster) -> list[str]:
        """Take in what others say; returns what is alarming. Raises if this site's own ledger is not the newest."""
        alarms: list[str] = []
        for text in told:
            statement = parse_statement(str(text))
            if statement is None or not statement.is_genuine(roster):
                continue
            alarms += self._known.hear(statement.heads, roster)
            if statement.site != self._site.name and statement.time >= self._started:
                self._witnesses.add(statement.site)
        self._check_own()
        return alarms

    def require_witnesses(self, roster: Roster) -> None:
        """Wait until enough others have said, since this process started, what they know of this site's ledger."""
        wanted = min(self._site.policy.witnesses, len(roster.sites) - 1)
        if len(self._witnesses) < wanted:
            raise NotYet(f"policy.witnesses: {len(self._witnesses)} of {wanted} other sites have confirmed its ledger")

    def make(self, audit_head: str) -> str:
        """This site's statement now, signed."""
        heads = {name: head for name, head in self._known.all().items() if name != self._site.name}
        own, budget = self._own()
        if own is not None:
            heads[self._site.name] = own
        unsigned = Statement(
            site=self._site.name,
            time=time.time(),
            heads=tuple(heads[name] for name in sorted(heads)),
            audit=audit_head,
            budget=budget,
        )
        return unsigned.model_copy(update={"signature": self._key.sign(STATEMENT, unsigned.body())}).model_dump_json()

    def require_budget(self, job: Job, plan: "PrivacyPlan") -> None:
        """Refuse a job whose budget has nothing left. Whether all its rounds fit is decided when they are reserved."""
        account = account_for(self._site, job.task.name, plan.section.unit, plan.relation)
        with open_site_ledger(self._site) as ledger:
            balance = ledger.balance(account)
        if balance.left_epsilon is not None and balance.left_epsilon <= 0:
            raise UsageError(f"{account}: nothing is left of its budget")

    def _own(self) -> tuple[SignedHead | None, dict[str, float] | None]:
        if not self._site.ledger.exists():
            return None, None
        with open_site_ledger(self._site) as ledger:
            budget = None
            if self._site.policy.show_budget:
                left = {b.account: b.left_epsilon for b in site_balances(self._site, ledger)}
                budget = {account: epsilon for account, epsilon in left.items() if epsilon is not None}
            return sign_head(self._key, self._site.name, ledger), budget

    def _check_own(self) -> None:
        own = self._known.all().get(self._site.name)
        if own is None:
            return
        with open_site_ledger(self._site) as ledger:
            require_newest(ledger, own)
