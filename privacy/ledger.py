"""The ledger: what each dataset of one site has spent on privacy, over all jobs, in one append-only SQLite file.

Reserve → compute → commit. A reservation is on disk before `reserve` returns; without one nothing is computed, and a
crash leaves it spent: the ledger may over-count, never under-count. Nothing is ever refunded, and a round that is asked
for again is a new spend; only the reservation of a whole job (sampling amplification needs it) is found again.

What is enforced is a Rényi filter per account (`privacy.ledger_account`): the budget's ε holds over jobs that are
chosen one after the other. Raising ε later is recorded; the claim over the raised budget assumes that the raise did not
depend on what was released. With a period, the budget bounds what is reserved in each window of the machine's clock,
and the windows add up.

Tampering is found by the hash chains (`privacy.ledger_chain`), an older copy by the counter (`privacy.ledger_counter`).
Neither stops whoever may write both files and recompute everything; heads exchanged between sites would show it.
"""

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from dp_accounting import DpEvent
from sqlalchemy import Connection, select

from fedplat.errors import UsageError
from fedplat.privacy_section import Relation, Unit
from privacy import ledger_posting as posting
from privacy.ledger_account import (
    Budget,
    BudgetExceeded,
    Charge,
    Outcome,
    Refusal,
    ReleaseIdentity,
    Reservation,
    Terms,
)
from privacy.ledger_balance import Balance, composed, read_balance, unopened_balance
from privacy.ledger_chain import Audit, Entry
from privacy.ledger_counter import Counter, Head, LedgerTampered, Note
from privacy.ledger_creation import create_file, default_counter, refuse_missing
from privacy.ledger_schema import check_triggers, entries, has_tables, in_words, open_engine
from privacy.ledger_store import TermsCache, Transaction

__all__ = [
    "Balance",
    "Budget",
    "BudgetExceeded",
    "Charge",
    "Entry",
    "Head",
    "Ledger",
    "LedgerTampered",
    "Outcome",
    "Refusal",
    "ReleaseIdentity",
    "Reservation",
    "Terms",
    "default_counter",
    "unopened_balance",
]


class Ledger:
    """One open ledger. Use it in the process that opened it; many processes may have it open at once."""

    def __init__(self, path: Path, counter: Path | None, readonly: bool) -> None:
        """Not for callers: `create` makes a ledger, `open` checks one."""
        self.path = path
        self.site = self.identity = ""
        self.counter = Counter(counter or default_counter(path))
        self._engine = open_engine(path, "ro" if readonly else "rw")
        self._terms: TermsCache = {}
        self._process = os.getpid()

    @classmethod
    def create(cls, path: Path, site: str, *, counter: Path | None = None) -> "Ledger":
        """Make a new ledger. One that exists, or that a counter remembers, is never replaced."""
        create_file(path, site, counter or default_counter(path))
        return cls.open(path, site, counter=counter)

    @classmethod
    def open(
        cls,
        path: Path,
        site: str | None = None,
        *,
        counter: Path | None = None,
        readonly: bool = False,
        verify: bool = True,
    ) -> "Ledger":
        """Open a ledger that exists. `verify` reads all of it; without, only its head and its counter are checked."""
        ledger = cls(path, counter, readonly)
        try:
            refuse_missing(path, ledger.counter)
            with ledger._snapshot() as transaction:
                ledger.site, ledger.identity = transaction.identity()
            if site is not None and ledger.site != site:
                raise UsageError(f"{path}: is the ledger of site '{ledger.site}', not of '{site}'. Use this site's own")
            if verify:
                ledger.verify()
        except BaseException:
            ledger.close()
            raise
        return ledger

    def close(self) -> None:
        self._engine.dispose()

    def __enter__(self) -> "Ledger":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- accounts and spending -------------------------------------------------------------------

    def open_account(
        self,
        account: str,
        *,
        dataset: str,
        unit: Unit,
        relation: Relation,
        budget: Budget | None,
        delta: float | None = None,
    ) -> None:
        """Open an account, or bring its ε in line. Without a budget it is unlimited: only for simulations."""
        self.open_accounts([Terms(account, dataset, unit, relation, budget, delta)])

    def open_accounts(self, terms: Sequence[Terms]) -> None:
        """The same for many accounts, in one transaction."""
        with self._writing() as transaction:
            transaction.load(term.account for term in terms)
            posting.require_one_unit(transaction, terms)
            for term in terms:
                known = transaction.last(term.account) is not None
                (posting.adjust_account if known else posting.open_account)(transaction, term)

    def reserve(self, charge: Charge) -> Reservation:
        """Spend, durably, before anything is computed. Raises BudgetExceeded, and then nothing was spent."""
        result = self.reserve_all([charge])[0]
        if isinstance(result, Refusal):
            raise result.error
        return result

    def reserve_all(self, charges: Sequence[Charge], cap: posting.Cap = None) -> list[Reservation | Refusal]:
        """One transaction for many charges, in order, each granted or refused by itself.

        `cap` is the most releases with a charge's purpose that its job may have from its account; a mapping gives it
        per account. A charge that makes no sense (unknown account, another relation) fails the whole call, and nothing
        is spent.
        """
        with self._writing() as transaction:
            transaction.load(charge.account for charge in charges)
            costs: posting.Costs = {}
            return [posting.reserve(transaction, charge, cap, costs) for charge in charges]

    def refusal(self, charge: Charge, cap: posting.Cap = None) -> BudgetExceeded | None:
        """Why `reserve_all` would refuse this charge now, or None. Writes nothing, promises nothing."""
        with self._reading() as transaction:
            _, found = posting.examine(transaction, charge, cap, {})
            return found.error if isinstance(found, Refusal) else None

    def whole_job(self, charge: Charge) -> Reservation | None:
        """The reservation of this whole job, if it has one."""
        with self._reading() as transaction:
            return posting.whole_job(transaction, charge)

    def unsettled(self, charge: Charge, *, kept: bool = False) -> Reservation | None:
        """The reservation of this very release that a crash left open.

        Nothing was released under it if releases leave only after `commit`, and it may then pay for the same release.
        That holds for a caller that computes nothing else meanwhile: two processes that both go on with one reservation
        would release twice for one charge. `kept`: the caller still has the bytes that were to be released, so that a
        reservation that was committed for them pays for them too.
        """
        with self._reading() as transaction:
            found = transaction.newest(charge.account, charge.identity, charge.purpose)
            if found is None:
                return None
            entry, outcome = found
            pays = outcome is None or (kept and outcome == "released")
            if not pays or entry.body["event"] != transaction.event(charge.event)[0]:
                return None
            return Reservation(entry.body["token"], entry.seq, entry.account, entry.body["event"], outcome)

    def commit(self, reservations: Sequence[Reservation], outcome: Outcome = "released") -> None:
        """Write down what became of reservations, in one transaction. Never a refund; once more is no error."""
        with self._writing() as transaction:
            posting.commit(transaction, reservations, outcome)

    def note(self, account: str, text: str) -> None:
        """Write a remark into an account's history."""
        with self._writing() as transaction:
            transaction.append(transaction.book(account), account, "note", {"text": text})

    # --- reading ---------------------------------------------------------------------------------

    def accounts(self) -> list[str]:
        with self._reading() as transaction:
            return transaction.names()

    def balance(self, account: str) -> Balance:
        with self._reading() as transaction:
            return read_balance(transaction, account)

    def balances(self, most_spent: int | None = None) -> list[Balance]:
        """All accounts by name, or the so many that have spent most, most first."""
        with self._reading() as transaction:
            names = transaction.names()
            transaction.load(names)
            if most_spent is not None:
                names = sorted(names, key=lambda name: transaction.book(name).totals.rdp, reverse=True)[:most_spent]
            return [read_balance(transaction, name) for name in names]

    def events(self, account: str, job: str | None = None) -> list[tuple[DpEvent, int]]:
        """Distinct events that were reserved, committed or not, and how often; of one job, or of all."""
        with self._reading() as transaction:
            transaction.book(account)
            return transaction.event_counts(account, job)

    def spent_event(self, account: str, job: str | None = None) -> DpEvent:
        """All of them as one event for an accountant."""
        return composed(self.events(account, job))

    def history(self, account: str) -> list[Entry]:
        """The entries of one account, oldest first."""
        with self._reading() as transaction:
            transaction.book(account)
            return transaction.history(account)

    def head(self) -> Head:
        with self._reading() as transaction:
            return transaction.head

    def contains(self, seq: int, digest: str) -> bool:
        """Was this the ledger's head at some time?"""
        with self._reading() as transaction:
            return transaction.head_at(seq) == Head(seq, digest)

    def verify(self) -> Head:
        """Read all of it: pages, triggers, every chain, every total, every event's cost, and the counter."""
        with self._snapshot() as transaction:
            problems = list(transaction.connection.exec_driver_sql("PRAGMA quick_check(1)").scalars())
            if problems != ["ok"]:
                raise LedgerTampered(f"{self.path}: the ledger is damaged ({problems[0]}). Put back the newest copy")
            rows = transaction.connection.execute(
                select(entries).order_by(entries.c.seq).execution_options(yield_per=1000)
            )
            return Audit(transaction.stored_event).over(rows)

    # --- transactions ----------------------------------------------------------------------------

    @contextlib.contextmanager
    def _connected(self, writes: bool = False) -> Iterator[Connection]:
        assert os.getpid() == self._process, "a ledger is not carried into another process: open it there"
        with in_words(self.path), self._engine.execution_options(writes=writes).begin() as connection:
            yield connection

    @contextlib.contextmanager
    def _reading(self) -> Iterator[Transaction]:
        with self._connected() as connection:
            yield Transaction(connection, self._terms)

    @contextlib.contextmanager
    def _snapshot(self) -> Iterator[Transaction]:
        """A read transaction whose head was checked against the counter, while others may be writing."""
        for _ in range(100):
            before = self.counter.read()
            with self._connected() as connection:
                self._check_tables(connection)
                transaction = Transaction(connection, self._terms)
                if self.counter.read() == before:  # nobody has begun or ended a transaction around this one's beginning
                    self._check_head(transaction, before, transaction.identity()[1])
                    yield transaction
                    return
        raise UsageError(f"{self.path}: too busy to be read as a whole. Try again")

    def _check_tables(self, connection: Connection) -> None:
        if has_tables(connection):
            check_triggers(connection, self.path)
        elif self.counter.read() is None:
            raise UsageError(f"{self.path}: not a fedplat ledger. Make one with: fedplat budget --init")
        else:
            raise LedgerTampered(f"{self.path}: the ledger was emptied. Put back the newest copy of it")

    def _check_head(self, transaction: Transaction, note: Note | None, identity: str) -> Note:
        return self.counter.check(note, self.path, identity, transaction.head, transaction.head_at)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[Transaction]:
        """A write transaction. The counter is ahead of the database, by this transaction at most."""
        ahead: Note | None = None
        with self._connected(writes=True) as connection:
            transaction = Transaction(connection, self._terms)
            before = transaction.head
            note = self._check_head(transaction, self.counter.read(), self.identity)
            yield transaction
            if transaction.new:
                transaction.flush()
                ahead = Note(self.identity, note.generation + 1, before, transaction.head)
                self.counter.write_ahead(ahead)
        if ahead is not None:
            self._terms |= transaction.opened
            self.counter.settle(ahead)
