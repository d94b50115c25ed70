"""A new ledger file, whole or not at all: built under a hidden name and renamed when its counter is there.

A crash on the way leaves no ledger, and a counter that has counted nothing and may be replaced.
"""

import contextlib
import fcntl
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

from fedplat.errors import UsageError
from fedplat.files import sync_directory
from privacy.ledger_counter import Counter, Head, LedgerTampered
from privacy.ledger_schema import create_tables, in_words, open_engine
from privacy.ledger_store import Transaction

LOCK_S = 10.0


def default_counter(path: Path) -> Path:
    return path.with_name(path.name + ".counter")


def refuse_missing(path: Path, counter: Counter) -> None:
    """A ledger that is not there: never made, or gone?"""
    if path.exists():
        return
    note = counter.read()
    if note is not None and note.generation > 1:
        raise LedgerTampered(
            f"{path}: the ledger is gone; its counter {counter.path} has seen entry {note.after.seq}. "
            "Put back the newest copy of it"
        )
    raise UsageError(f"{path}: no ledger there. Make one with: fedplat budget --init")


def create_file(path: Path, site: str, counter: Path) -> None:
    partial = path.with_name(f".{path.name}.part")
    try:
        with _locked(path.parent):
            if path.exists():
                raise UsageError(f"{path}: exists already")
            identity = secrets.token_hex(16)
            head = _build(partial, site, identity)
            Counter(counter).create(identity, head)
            partial.rename(path)
            sync_directory(path.parent)
    except OSError as error:
        raise UsageError(f"{path}: can't be created: {error.strerror}") from None


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Two processes that make the same ledger must not mix their counters."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        _lock(descriptor, folder)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, folder: Path) -> None:
    """Making a ledger takes a moment: who holds the lock for longer is stuck, or means harm."""
    deadline = time.monotonic() + LOCK_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise UsageError(
                    f"{folder}: another process has held its lock for {LOCK_S:g} s. See who with: lsof {folder}"
                ) from None
            time.sleep(0.02)


def _build(path: Path, site: str, identity: str) -> Head:
    path.unlink(missing_ok=True)
    os.close(os.open(path, os.O_CREAT | os.O_EXCL, 0o600))
    engine = open_engine(path)
    try:
        with in_words(path):
            with engine.connect() as connection:
                connection.connection.execute("PRAGMA journal_mode = WAL")  # not possible inside a transaction
            with engine.execution_options(writes=True).begin() as connection:
                create_tables(connection)
                transaction = Transaction(connection, {})
                transaction.begin_ledger(site, identity)
                transaction.flush()
                return transaction.head
    finally:
        engine.dispose()
