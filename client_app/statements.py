"""What this site says of its ledger, and what it has heard of others': see `privacy.ledger_heads`."""

import random
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedplat.consortium.identity import SigningKey
from fedplat.consortium.roster import Roster
from fedplat.errors import FedplatError, UsageError
from fedplat.job import Job
from privacy.ledger_heads import (
    MOST_BUDGETS,
    MOST_HEADS,
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


MOST_TOLD = 100
"""Other sites that one statement speaks of, so that it stays small; of more sites it takes turns by chance."""


class NotYet(FedplatError):
    """The site can't answer this request now, and may later."""


class Statements:
    """One site's statements."""

    def __init__(self, site: "Site", key: SigningKey, path: Path) -> None:
        self._site, self._key = site, key
        self._known = KnownHeads(path)
        self._nonce = secrets.token_hex(16)
        """Of this start: whoever repeats it has heard of this site since."""
        self._heard: dict[str, Statement] = {}
        """The newest statement of each other site since this start."""
        self._witnesses: set[str] = set()
        self._check_own()

    def hear(self, told: Sequence[object], roster: Roster) -> list[str]:
        """Take in what others say; returns what is alarming. Raises if this site's own ledger is not the newest."""
        genuine = self._genuine(told, roster)
        alarms = self._known.hear((head for statement in genuine for head in statement.heads), roster)
        self._check_own()
        for statement in genuine:
            if statement.site == self._site.name:
                continue
            before = self._heard.get(statement.site)
            if before is None or before.time < statement.time:
                self._heard[statement.site] = statement
            if self._confirms(statement, roster):
                self._witnesses.add(statement.site)
        return alarms

    def _genuine(self, told: Sequence[object], roster: Roster) -> list[Statement]:
        """One statement of each site at most: it costs no more to hear them than there are sites."""
        found: dict[str, Statement] = {}
        for text in told[:MOST_HEADS]:
            statement = parse_statement(str(text))
            if statement is None or statement.site in found:
                continue
            if statement == self._heard.get(statement.site) or statement.is_genuine(roster):
                found[statement.site] = statement
        return list(found.values())

    def _confirms(self, statement: Statement, roster: Roster) -> bool:
        """Did this site speak after it had heard of ours since our start, and does it know the same ledger?"""
        if statement.heard.get(self._site.name) != self._nonce:
            return False
        head = statement.about(self._site.name)
        if head is None:
            return not self._site.ledger.exists()  # it has heard of a ledger if there is one to speak of
        if not head.is_genuine(roster):
            return False
        with open_site_ledger(self._site) as ledger:
            require_newest(ledger, head)
        return True

    def require_witnesses(self, roster: Roster) -> None:
        """Wait until enough others have said, since this process started, what they know of this site's ledger."""
        wanted = min(self._site.policy.witnesses, len(roster.sites) - 1)
        have = len(self._witnesses & set(roster.sites))
        if have < wanted:
            raise NotYet(f"policy.witnesses: {have} of {wanted} other sites have confirmed its ledger")

    def make(self, audit_head: str) -> str:
        """This site's statement now, signed."""
        known = {name: head for name, head in self._known.all().items() if name != self._site.name}
        others = sorted(known.keys() | self._heard.keys())
        others = others if len(others) <= MOST_TOLD else random.sample(others, MOST_TOLD)
        heads = {name: known[name] for name in others if name in known}
        own, budget = self._own()
        if own is not None:
            heads[self._site.name] = own
        unsigned = Statement(
            site=self._site.name,
            time=time.time(),
            heads=tuple(heads[name] for name in sorted(heads)),
            audit=audit_head,
            budget=budget,
            nonce=self._nonce,
            heard={name: self._heard[name].nonce for name in others if name in self._heard},
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
                shown = {account: epsilon for account, epsilon in sorted(left.items()) if epsilon is not None}
                budget = dict(list(shown.items())[:MOST_BUDGETS])
            return sign_head(self._key, self._site.name, ledger), budget

    def _check_own(self) -> None:
        own = self._known.of(self._site.name)
        if not own:
            return
        with open_site_ledger(self._site) as ledger:
            for head in own:
                require_newest(ledger, head)
