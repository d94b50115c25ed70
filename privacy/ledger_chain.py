"""The hash chain of the ledger, and the audit that recomputes all of it.

Each account has its chain, h_i = SHA-256("fedplat-ledger-v1" ‖ h_{i-1} ‖ canonical JSON of entry i), and the ledger has
one over all entries in their order, head_i = SHA-256("fedplat-ledger-head-v1" ‖ head_{i-1} ‖ h_i): an edit, a deletion,
a swap or an insertion anywhere changes the head. A chain alone can't show that its last entries were cut off, or that
somebody recomputed all of it: the counter (`privacy.ledger_counter`) and heads exchanged between sites do that.
"""

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Row

from fedplat import canonical
from privacy.accountants.rdp import NotTaken
from privacy.events import event_from_json
from privacy.ledger_account import Book, Tallies, add_up, advance, refusal, tallied
from privacy.ledger_counter import Head, LedgerTampered
from privacy.renyi_filter import FilterCharge, RenyiBudget, charge_of

LEDGER = "@ledger"
"""The chain of the ledger itself: its one entry says which site's ledger this is."""
START = bytes(32)
NOTHING = Head(0, START.hex())
TOLERANCE = 1e-6
"""How far a recorded cost may lie from today's accountant's: room for another version of a library, not for a lie."""
RANKING_EPSILON = 700.0
"""Some budget, large enough for any δ, to total an account that has none."""


@dataclass(frozen=True)
class Entry:
    seq: int
    account: str
    number: int
    """Within the account, from 1."""
    kind: str
    time: float
    body: Mapping[str, Any]
    prev_hash: bytes
    hash: bytes
    head: bytes

    def as_row(self) -> dict[str, Any]:
        return vars(self) | {"body": canonical.dumps(self.body)}


def make_entry(last: Head, previous: Entry | None, account: str, kind: str, time: float, body: dict[str, Any]) -> Entry:
    """The entry that follows `last` in the ledger and `previous` in its account."""
    seq, number, prev_hash = last.seq + 1, previous.number + 1 if previous else 1, previous.hash if previous else START
    own = _hash(prev_hash, seq, account, number, kind, time, body)
    head = hashlib.sha256(b"fedplat-ledger-head-v1" + bytes.fromhex(last.hash) + own).digest()
    return Entry(seq, account, number, kind, time, body, prev_hash, own, head)


def _hash(
    prev_hash: bytes, seq: int, account: str, number: int, kind: str, time: float, body: Mapping[str, Any]
) -> bytes:
    content = {"account": account, "body": body, "kind": kind, "number": number, "seq": seq, "time": time}
    return hashlib.sha256(b"fedplat-ledger-v1" + prev_hash + canonical.dumps(content).encode()).digest()


def read_entry(row: Row[Any]) -> Entry:
    """An entry from the database whose own hash is right."""
    try:
        body = json.loads(row.body)
        own = _hash(row.prev_hash, row.seq, row.account, row.number, row.kind, row.time, body)
        same = own == row.hash and canonical.dumps(body) == row.body
    except (ValueError, TypeError):
        same = False
    if not same:
        raise tampered(row.account, row.seq, "was changed")
    return Entry(row.seq, row.account, row.number, row.kind, row.time, body, row.prev_hash, own, row.head)


def tampered(account: str, seq: int, what: str) -> LedgerTampered:
    return LedgerTampered(
        f"the ledger was tampered with: entry {seq} (account '{account}') {what}. Keep the file as evidence and put "
        "back the newest good copy",
        account,
        seq,
    )


def event_cost(book: Book, event_json: str) -> FilterCharge:
    """What an event costs at the account's order. An unlimited account also takes what only PLD can account."""
    event = event_from_json(json.loads(event_json))
    if book.filter is not None:
        return charge_of(event, book.filter, book.relation)
    with contextlib.suppress(NotTaken):
        return FilterCharge(charge_of(event, RenyiBudget(RANKING_EPSILON, book.delta, book.order), book.relation).rdp)
    return FilterCharge(0.0)


@dataclass
class Audit:
    """Recomputes every chain, every total and every admission, entry by entry in the ledger's order."""

    event_of: Callable[[str], str]
    """Canonical JSON of an event by its digest."""
    head: Head = NOTHING
    _last: dict[str, Entry] = field(default_factory=dict)
    _books: dict[str, Book] = field(default_factory=dict)
    _open: dict[int, tuple[str, float, int]] = field(default_factory=dict)
    """Reservations without a commit: account, RDP, window."""
    _tallies: dict[tuple[str, str], Tallies] = field(default_factory=dict)
    _costs: dict[tuple[str, float, str, float | None], FilterCharge] = field(default_factory=dict)

    def over(self, rows: Iterable[Row[Any]]) -> Head:
        for row in rows:
            entry = read_entry(row)
            self._check_links(entry)
            try:
                self._check_meaning(entry)
            except (KeyError, TypeError, ValueError) as error:
                raise tampered(entry.account, entry.seq, f"does not follow from those before it ({error})") from None
            self._last[entry.account] = entry
            self.head = Head(entry.seq, entry.head.hex())
        return self.head

    def _check_links(self, entry: Entry) -> None:
        if entry.seq != self.head.seq + 1:
            raise tampered(entry.account, self.head.seq + 1, "is missing")
        previous = self._last.get(entry.account)
        expected = make_entry(self.head, previous, entry.account, entry.kind, entry.time, dict(entry.body))
        if (expected.number, expected.prev_hash) != (entry.number, entry.prev_hash):
            raise tampered(entry.account, entry.seq, "does not follow the one before it in its account")
        if expected.head != entry.head:
            raise tampered(entry.account, entry.seq, "does not fit the ledger's head: entries were moved or replaced")

    def _check_meaning(self, entry: Entry) -> None:
        if entry.account == LEDGER:
            if entry.seq != 1:
                raise ValueError("a second ledger in the ledger")
            return
        book, body = self._books.get(entry.account), entry.body
        if book and entry.kind == "reserve":
            self._check_reservation(book.at(entry.time), entry)
        if entry.kind == "commit":
            reserved = self._open.pop(body["reservation"], None)
            if reserved != (entry.account, body["rdp"], body["window"]):
                raise ValueError("it commits what was not reserved, or for another amount")
        after = advance(book, entry.account, entry.kind, body, entry.number, entry.time)
        if body["after"] != after.totals.as_json():
            raise ValueError("its totals are wrong")
        if entry.kind == "reserve":
            self._open[entry.seq] = (entry.account, body["rdp"], after.totals.window)
        self._books[entry.account] = after

    def _check_reservation(self, book: Book, entry: Entry) -> None:
        body = entry.body
        mine = (entry.account, body["identity"]["job"])
        earlier = self._tallies.get(mine, {})
        if earlier != body["earlier"]:
            raise ValueError("its count of the job's releases is wrong")
        self._tallies[mine] = tallied(earlier, body["purpose"], body["identity"]["round"])
        cost = self._cost(book, body["event"])
        if not (_agree(body["rdp"], cost.rdp) and _agree(body["slack"], add_up(cost.slack, body["delta_slack"]))):
            raise ValueError("it records another cost than that of its event")
        if refusal(book, body["rdp"], body["slack"]) is not None:
            raise ValueError("it exceeds the budget of its time")

    def _cost(self, book: Book, digest: str) -> FilterCharge:
        key = (digest, book.order, book.relation, book.epsilon)
        if key not in self._costs:
            self._costs[key] = event_cost(book, self.event_of(digest))
        return self._costs[key]


def _agree(recorded: float, computed: float) -> bool:
    return abs(recorded - computed) <= TOLERANCE * abs(computed)
