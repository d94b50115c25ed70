"""The simulation's own ledger: every virtual client's spends, one transaction per round, never a site's.

Wraps any engine. What a submitted round costs is reserved for all its clients at once, before any of them trains; a
client whose releases are used up is refused like a site with an empty budget. A retried or repeated request is a new
spend.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from client_app.charges import Purpose, charge_of, most_releases
from client_app.handler import Handler, name_of
from client_app.spending import require_enough_examples
from fedplat import wire
from fedplat.errors import UsageError
from fedplat.flower import error_reply
from fedplat.wire import Identity
from privacy.ledger import Charge, Ledger, Refusal, Reservation, Terms
from privacy.plan import PrivacyPlan
from server_app.stack import UpdateStack
from simulations.engine import Delivery, Done, Engine

SITE = "simulation"


def open_simulation_ledger(path: Path, plan: PrivacyPlan, clients: Sequence[str]) -> Ledger:
    """The ledger of a run, with an account without a budget for each virtual client; made if the run has none."""
    if path.exists():
        return Ledger.open(path, SITE)
    ledger = Ledger.create(path, SITE)
    section = plan.section
    ledger.open_accounts([Terms(c, c, section.unit, plan.relation, None, section.delta) for c in clients])
    return ledger


def _rounds_before(ledger: Ledger, plan: PrivacyPlan) -> dict[str, int]:
    """Training rounds that clients have been charged for in an earlier part of this run."""
    releases = {balance.account: balance.releases for balance in ledger.balances() if balance.releases}
    if plan.evaluations == 0:
        return releases
    train = plan.round_event
    return {account: sum(n for event, n in ledger.events(account) if event == train) for account in releases}


class AccountedEngine:
    """Charges deliveries to the simulation's ledger before another engine computes them."""

    def __init__(self, engine: Engine, handler: Handler, plan: PrivacyPlan, ledger: Ledger) -> None:
        self._engine, self._handler, self._plan, self._ledger = engine, handler, plan, ledger
        self._refused: list[Done | UpdateStack] = []
        self._reserved: dict[str, Reservation] = {}
        self._released: list[Reservation] = []
        self._failed: list[Reservation] = []
        self._trained = Counter(_rounds_before(ledger, plan))

    def submit(self, deliveries: Sequence[Delivery]) -> None:
        private = [d for d in deliveries if d.message.metadata.message_type in ("train", "evaluate")]
        refused = self._charge(private)
        self._engine.submit([d for d in deliveries if d.message_id not in refused])

    def collect(self) -> list[Done | UpdateStack]:
        if self._refused:
            refused, self._refused = self._refused, []
            return refused
        results = self._engine.collect()
        for result in results:
            self._settle(result)
        if self._engine.is_idle():
            self._commit()
        return results

    def is_idle(self) -> bool:
        return not self._refused and self._engine.is_idle()

    def close(self) -> None:
        self._engine.close()
        self._ledger.close()

    def most_releases(self) -> int:
        """Training rounds of the client that has had most of them, repeated ones included."""
        return max(self._trained.values(), default=0)

    def _charge(self, deliveries: list[Delivery]) -> set[str]:
        """Reserve for all; returns the message ids of those that were refused."""
        refused: set[str] = set()
        for purpose in ("train", "evaluate"):
            charged: list[tuple[Delivery, Charge]] = []
            for delivery in deliveries:
                if delivery.message.metadata.message_type != purpose:
                    continue
                try:
                    charged.append((delivery, self._charge_of(delivery, purpose)))
                except UsageError as error:
                    refused.add(self._refuse(delivery, str(error)))
            if charged:
                refused |= self._reserve(charged, purpose)
        return refused

    def _reserve(self, charged: list[tuple[Delivery, Charge]], purpose: Purpose) -> set[str]:
        refused: set[str] = set()
        results = self._ledger.reserve_all([c for _, c in charged], most_releases(self._plan, purpose))
        for (delivery, charge), result in zip(charged, results, strict=True):
            if isinstance(result, Refusal):
                refused.add(self._refuse(delivery, f"privacy: {result.reason}"))
                continue
            self._reserved[delivery.message_id] = result
            if purpose == "train":
                self._trained[charge.account] += 1
        return refused

    def _charge_of(self, delivery: Delivery, purpose: Purpose) -> Charge:
        client = name_of(delivery.context)
        asked = Identity.of(delivery.message.content, wire.CONFIG)
        rows = self._handler.data.rows(client)
        examples = len(rows.train if purpose == "train" else rows.holdout)
        require_enough_examples(self._plan, purpose, examples)
        identity = Identity(asked.job, asked.round, asked.attempt, client)
        return charge_of(client, self._handler.job, self._plan, identity, purpose, examples)

    def _refuse(self, delivery: Delivery, reason: str) -> str:
        self._refused.append(Done(delivery, error_reply(delivery.message, reason)))
        return delivery.message_id

    def _settle(self, result: Done | UpdateStack) -> None:
        ids = result.message_ids if isinstance(result, UpdateStack) else [result.delivery.message_id]
        failed = isinstance(result, Done) and result.reply.has_error()
        for message_id in ids:
            if message_id in self._reserved:
                (self._failed if failed else self._released).append(self._reserved.pop(message_id))

    def _commit(self) -> None:
        for reservations, outcome in ((self._released, "released"), (self._failed, "failed")):
            if reservations:
                self._ledger.commit(reservations, outcome)  # type: ignore[arg-type]
        self._released, self._failed = [], []
