"""One transaction on the ledger's tables: reads the latest entries, collects new ones, writes them in one go.

Reading the state of an account means reading its last entry, which carries the account's totals, and checking that
entry's own hash. Many accounts are read by few statements: a simulated round charges thousands in one transaction.
"""

import hashlib
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any, TypeVar

from dp_accounting import DpEvent
from sqlalchemy import ColumnElement, Connection, Select, func, select
from sqlalchemy.dialects.sqlite import insert

from fedplat.errors import UsageError, unknown_name
from privacy.events import event_from_json, event_key
from privacy.ledger_account import Book, Outcome, ReleaseIdentity, Tallies, Totals, advance
from privacy.ledger_chain import LEDGER, NOTHING, Entry, make_entry, read_entry, tampered
from privacy.ledger_counter import Head, LedgerTampered
from privacy.ledger_schema import accounts, entries, events

Item = TypeVar("Item")
TermsCache = dict[tuple[str, int], Book]
"""Terms in force by (account, number of its budget entry): they never change."""


def _chunks(items: Iterable[Item], size: int = 1000) -> Iterator[Sequence[Item]]:
    whole = list(items)
    return (whole[start : start + size] for start in range(0, len(whole), size))


RECENT = 16
"""Reservations of a job among which an unsettled one is looked for: whoever goes on with it works on one at a time."""


class Transaction:
    """Between BEGIN and COMMIT. Nothing is in the database before `flush`."""

    def __init__(self, connection: Connection, terms: TermsCache) -> None:
        self.connection = connection
        self.now = time.time()
        self.new: list[Entry] = []
        self.opened: TermsCache = {}
        """Terms declared by this transaction: they hold for others once it has committed."""
        self._terms = terms
        self._last: dict[str, Entry | None] = {}
        self._events: dict[str, str] = {}
        self._digests: dict[int, str] = {}
        self._charged: dict[tuple[str, str], Entry] = {}
        """Last new reservation by account and job, and that of the whole job."""
        self._charged_jobs: dict[tuple[str, str], Entry] = {}
        last = connection.execute(select(func.max(entries.c.seq))).scalar()
        self.head = (self.head_at(last) if last else None) or NOTHING

    # --- reading ---------------------------------------------------------------------------------

    def identity(self) -> tuple[str, str]:
        """Site and random id of this ledger."""
        entry = self._entry(LEDGER, 1)
        return entry.body["site"], entry.body["ledger"]

    def head_at(self, seq: int) -> Head | None:
        """The ledger's head as it was after that entry."""
        found = self.connection.execute(select(entries.c.head).where(entries.c.seq == seq)).scalar()
        return Head(seq, found.hex()) if isinstance(found, bytes) else None

    def load(self, names: Iterable[str]) -> None:
        """Read the last entries of many accounts at once."""
        older = entries.alias()
        newest = select(func.max(older.c.number)).where(older.c.account == accounts.c.name).scalar_subquery()
        joined = accounts.join(entries, (entries.c.account == accounts.c.name) & (entries.c.number == newest))
        for chunk in _chunks(name for name in set(names) if name not in self._last):
            self._last |= dict.fromkeys(chunk)
            query = select(entries).select_from(joined).where(accounts.c.name.in_(chunk))
            self._last |= {row.account: read_entry(row) for row in self.connection.execute(query)}

    def last(self, account: str) -> Entry | None:
        if account not in self._last:
            self.load([account])
        return self._last[account]

    def names(self) -> list[str]:
        return sorted(set(self.connection.execute(select(accounts.c.name)).scalars()) - {LEDGER})

    def book(self, account: str) -> Book:
        """The account as it stands after its last entry."""
        last = self.last(account)
        if last is None or account == LEDGER:
            known = self.names()
            raise UsageError(unknown_name("account", account, known) if known else f"no account '{account}' yet")
        totals = Totals(**last.body["after"])
        key = (account, totals.budget)
        if key in self.opened:
            return replace(self.opened[key], totals=totals)
        if key not in self._terms:
            genesis, budget = self._entry(account, 1), self._entry(account, totals.budget)
            opened = advance(None, account, "genesis", genesis.body, 1, genesis.time)
            self._terms[key] = advance(opened, account, "budget", budget.body, budget.number, budget.time)
        return replace(self._terms[key], totals=totals)

    def job_tallies(self, book: Book, job: str) -> Tallies:
        """What this job has had from this account: read from its newest entry, however many there are."""
        if book.totals.job == job:
            return book.totals.tallies
        if book.totals.releases == 0:
            return {}
        newest = self._charged.get((book.account, job))
        if newest is None:
            mine = (entries.c.account == book.account) & (entries.c.job == job)
            newest = self._first(select(entries).where(mine).order_by(entries.c.seq.desc()))
        return Totals(**newest.body["after"]).tallies if newest else {}

    def job_reservation(self, account: str, job: str) -> Entry | None:
        """The reservation of this whole job, if it has one."""
        mine = (entries.c.account == account) & (entries.c.job == job) & (entries.c.purpose == "job")
        return self._charged_jobs.get((account, job)) or self._first(select(entries).where(mine))

    def newest(self, account: str, identity: ReleaseIdentity, purpose: str) -> tuple[Entry, Outcome | None] | None:
        """The newest reservation of this very release, and what became of it."""
        mine = (entries.c.account == account) & (entries.c.job == identity.job) & (entries.c.purpose == purpose)
        newest = select(entries).where(mine & (entries.c.kind == "reserve")).order_by(entries.c.seq.desc())
        for row in self.connection.execute(newest.limit(RECENT)):
            entry = read_entry(row)
            if entry.body["identity"] == asdict(identity):
                return entry, self.outcomes([entry.seq]).get(entry.seq)
        return None

    def entries_by_seq(self, numbers: Iterable[int]) -> dict[int, Entry]:
        return {entry.seq: entry for chunk in _chunks(numbers) for entry in self._where(entries.c.seq.in_(chunk))}

    def outcomes(self, reservations: Iterable[int]) -> dict[int, Outcome]:
        """Outcomes of those reservations that were committed."""
        found = (e for chunk in _chunks(reservations) for e in self._where(entries.c.reservation.in_(chunk)))
        return {entry.body["reservation"]: entry.body["outcome"] for entry in found}

    def history(self, account: str) -> list[Entry]:
        return sorted(self._where(entries.c.account == account), key=lambda entry: entry.number)

    def event_counts(self, account: str, job: str | None) -> list[tuple[DpEvent, int]]:
        """Distinct events of an account (or of one job on it) and how often each was reserved."""
        condition = (entries.c.account == account) & (entries.c.kind == "reserve")
        if job is not None:
            condition &= entries.c.job == job
        query = select(entries.c.event, func.count()).where(condition).group_by(entries.c.event)
        counts = self.connection.execute(query.order_by(func.min(entries.c.seq))).all()
        return [(event_from_json(json.loads(self.stored_event(digest))), count) for digest, count in counts]

    def stored_event(self, digest: str) -> str:
        text = self.connection.execute(select(events.c.json).where(events.c.digest == digest)).scalar()
        if text is None or hashlib.sha256(text.encode()).hexdigest() != digest:
            raise LedgerTampered(f"the ledger was tampered with: the event {digest} is missing or was changed")
        return str(text)

    def _first(self, query: Select[Any]) -> Entry | None:
        row = self.connection.execute(query.limit(1)).first()
        return read_entry(row) if row else None

    def _where(self, condition: ColumnElement[bool]) -> list[Entry]:
        return [read_entry(row) for row in self.connection.execute(select(entries).where(condition))]

    def _entry(self, account: str, number: int) -> Entry:
        found = self._where((entries.c.account == account) & (entries.c.number == number))
        if not found:
            raise tampered(account, self.head.seq, f"points to number {number}, which is missing")
        return found[0]

    # --- appending -------------------------------------------------------------------------------

    def event(self, event: DpEvent) -> tuple[str, str]:
        """Digest and canonical JSON of an event, which will be stored once."""
        if id(event) not in self._digests:
            text = event_key(event)
            self._digests[id(event)] = digest = hashlib.sha256(text.encode()).hexdigest()
            self._events[digest] = text
        digest = self._digests[id(event)]
        return digest, self._events[digest]

    def append(self, book: Book | None, account: str, kind: str, body: dict[str, Any]) -> Book:
        """Add an entry to an account's chain; returns the account after it."""
        previous = self.last(account)
        after = advance(book, account, kind, body, previous.number + 1 if previous else 1, self.now)
        entry = self._add(previous, account, kind, body | {"after": after.totals.as_json()})
        if kind == "budget":
            self.opened[account, entry.number] = after
        elif kind == "reserve":
            charged = [self._charged] + [self._charged_jobs] * (body["purpose"] == "job")
            for index in charged:
                index[account, body["identity"]["job"]] = entry
        return after

    def begin_ledger(self, site: str, identity: str) -> None:
        self._last[LEDGER] = None
        self._add(None, LEDGER, "genesis", {"format": 1, "site": site, "ledger": identity})

    def _add(self, previous: Entry | None, account: str, kind: str, body: dict[str, Any]) -> Entry:
        entry = make_entry(self.head, previous, account, kind, self.now, body)
        self._last[account] = entry
        self.head = Head(entry.seq, entry.head.hex())
        self.new.append(entry)
        return entry

    def flush(self) -> None:
        """Insert what was collected. It counts when the transaction commits, not before."""
        opened = [{"name": entry.account} for entry in self.new if entry.number == 1]
        used = {entry.body["event"] for entry in self.new if entry.kind == "reserve"}
        if opened:
            self.connection.execute(insert(accounts), opened)
        if used:
            known = [{"digest": digest, "json": self._events[digest]} for digest in sorted(used)]
            self.connection.execute(insert(events).on_conflict_do_nothing(), known)
        self.connection.execute(insert(entries), [entry.as_row() for entry in self.new])
