"""A monotone counter beside the ledger, so that an older copy of the database is noticed.

Every write transaction first notes here, durably, from which entry to which it goes (`write_ahead`), then commits, then
notes that it is done (`settle`, not synced). A settled note must say where the database ends. A note that a crash left
open says no more than that the database contains the entry it starts from: SQLite's recovery may bring back a
transaction that was killed while it committed, even one whose note was overtaken by another that was killed too.
Anything else is refused: rolled back, forked, or cut off.

What it can't notice: ledger and counter restored together from the same moment, and whoever may write both files. Put
the counter on another disk (site.toml: `counter`) so that one backup does not hold both; the heads that sites exchange
catch the rest. After a power cut that lost the unsynced `settle`, a copy older by exactly the last transaction passes.

The file has three slots, each in a page of its own with its checksum: write-aheads alternate between the first two,
`settle` has the third. A torn write spoils one slot and leaves another that is still true.
"""

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from fedplat import canonical
from fedplat.errors import JobError, UsageError
from fedplat.files import write_file

_PAGE, _SLOT, _SLOTS = 4096, 512, 3
_DIGEST = 64


class LedgerTampered(JobError):
    """The ledger is not what was written: `account` and `seq` say where it first shows."""

    def __init__(self, message: str, account: str | None = None, seq: int | None = None) -> None:
        super().__init__(message)
        self.account, self.seq = account, seq


@dataclass(frozen=True)
class Head:
    """The whole ledger in one hash, over all entries in their order."""

    seq: int
    hash: str


@dataclass(frozen=True)
class Note:
    """One write transaction: the heads it goes from and to."""

    ledger: str
    generation: int
    before: Head
    after: Head
    settled: bool = False


class Counter:
    """The file. It is opened afresh for each use: a file that was replaced meanwhile must not go unnoticed."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def create(self, ledger: str, head: Head) -> None:
        """A counter for a new ledger. One that has counted is never replaced: its ledger may only be mislaid."""
        if self.path.exists() and (note := self.read()) is not None and note.generation > 1:
            raise UsageError(
                f"{self.path}: counts a ledger that has {note.after.seq} entries and is not there. Put that ledger "
                "back: a new one would forget what was spent. If it is lost for good, move the counter away and "
                "lower epsilon by what may have been spent"
            )
        write_file(self.path, bytes(_SLOTS * _PAGE))
        self.path.chmod(0o600)
        self.write_ahead(Note(ledger, 1, head, head))

    def read(self) -> Note | None:
        """The newest note that is whole, or None if there is none."""
        try:
            content = self.path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise UsageError(f"{self.path}: the ledger's counter can't be read: {error.strerror}") from None
        notes = [note for slot in range(_SLOTS) if (note := _decode(content[slot * _PAGE :][:_SLOT]))]
        return max(notes, key=lambda note: (note.generation, note.settled), default=None)

    def write_ahead(self, note: Note) -> None:
        self._write(note.generation % 2, note, durable=True)

    def settle(self, note: Note) -> None:
        self._write(2, replace(note, settled=True), durable=False)

    def _write(self, slot: int, note: Note, durable: bool) -> None:
        try:
            descriptor = os.open(self.path, os.O_WRONLY)
            try:
                os.pwrite(descriptor, _encode(note), slot * _PAGE)
                if durable:
                    os.fdatasync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise JobError(f"{self.path}: the ledger's counter can't be written: {error.strerror}") from None

    def check(
        self, note: Note | None, ledger: Path, identity: str, head: Head, head_at: Callable[[int], Head | None]
    ) -> Note:
        """The note, if a database at this head is what it speaks of; `head_at` gives the head after an entry."""
        if note is None:
            raise LedgerTampered(
                f"{self.path}: the counter of {ledger} is missing or damaged, so nobody can tell whether the ledger is "
                "the newest. Put it back; a ledger is never used without it"
            )
        if note.ledger != identity:
            raise LedgerTampered(f"{self.path}: is the counter of another ledger than {ledger}. Put back the right one")
        if head == note.after or (not note.settled and head_at(note.before.seq) == note.before):
            return note
        raise LedgerTampered(self._mismatch(ledger, note, head), seq=head.seq)

    def _mismatch(self, ledger: Path, note: Note, head: Head) -> str:
        newest = note.after.seq
        if head.seq < newest:
            return (
                f"{ledger}: ends at entry {head.seq}, but its counter {self.path} has seen entry {newest}. Restored "
                "from a backup, or copied without its -wal file? Put back the newest copy. If it is lost, what was "
                "spent since is unknown: move both files away, lower epsilon by what may have been spent, and start "
                "anew with: fedplat budget --init"
            )
        if head.seq > newest:
            return (
                f"{ledger}: is at entry {head.seq}, its counter {self.path} only at {newest}: the counter is an old "
                "copy. Put back the newest one"
            )
        return (
            f"{ledger}: entry {head.seq} is not the one that its counter {self.path} has seen: the history was changed"
        )


def _encode(note: Note) -> bytes:
    text = canonical.dumps(asdict(note)).encode()
    return (hashlib.sha256(text).hexdigest().encode() + text).ljust(_SLOT)


def _decode(slot: bytes) -> Note | None:
    digest, text = slot[:_DIGEST], slot[_DIGEST:].rstrip()
    if hashlib.sha256(text).hexdigest().encode() != digest:
        return None
    fields = json.loads(text)
    return Note(**(fields | {"before": Head(**fields["before"]), "after": Head(**fields["after"])}))
