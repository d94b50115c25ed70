"""The ledger's tables, how SQLite is opened, and SQLite's errors in words.

WAL with synchronous=FULL: a transaction is on disk when its COMMIT returns. Writers BEGIN IMMEDIATE: whoever reads an
account in order to charge it already holds the only write lock, so two jobs can't both see the last ε. Triggers forbid
every UPDATE and DELETE and every entry out of order; they guard against mistakes, the hash chain against intent.
"""

import contextlib
import os
import random
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

from sqlalchemy import (
    Column,
    Computed,
    Connection,
    Engine,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    QueuePool,
    Table,
    Text,
    UniqueConstraint,
    create_engine,
    event,
)
from sqlalchemy.exc import DBAPIError, OperationalError

from fedplat.errors import FedplatError, JobError, UsageError
from privacy.ledger_counter import LedgerTampered

BUSY_TIMEOUT_S = 30.0
metadata = MetaData()


def _from_body(name: str, path: str, kind: type[Text] | type[Integer] = Text) -> Column[object]:
    """A column that is read out of the body, so that it can be searched and can't disagree with it."""
    return Column(name, kind, Computed(f"json_extract(body, '$.{path}')", persisted=False))


accounts = Table("accounts", metadata, Column("name", Text, primary_key=True))
events = Table(
    "events",
    metadata,
    Column("digest", Text, primary_key=True),
    Column("json", Text, nullable=False),
)
entries = Table(
    "entries",
    metadata,
    Column("seq", Integer, primary_key=True),
    Column("account", Text, ForeignKey("accounts.name"), nullable=False),
    Column("number", Integer, nullable=False),
    Column("kind", Text, nullable=False),
    Column("time", Float, nullable=False),
    Column("body", Text, nullable=False),
    Column("prev_hash", LargeBinary, nullable=False),
    Column("hash", LargeBinary, nullable=False),
    Column("head", LargeBinary, nullable=False),
    _from_body("job", "identity.job"),
    _from_body("purpose", "purpose"),
    _from_body("event", "event"),
    _from_body("reservation", "reservation", Integer),
    UniqueConstraint("account", "number"),
)
Index("entries_by_job", entries.c.account, entries.c.job, entries.c.purpose, sqlite_where=entries.c.job.is_not(None))
Index("one_commit_each", entries.c.reservation, unique=True, sqlite_where=entries.c.reservation.is_not(None))

TRIGGERS = {
    **{
        f"{table}_no_{verb.lower()}": f"CREATE TRIGGER {table}_no_{verb.lower()} BEFORE {verb} ON {table} "
        f"BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END"
        for table in ("accounts", "events", "entries")
        for verb in ("UPDATE", "DELETE")
    },
    "entries_in_order": "CREATE TRIGGER entries_in_order BEFORE INSERT ON entries "
    "WHEN NEW.seq IS NOT (SELECT coalesce(max(seq), 0) + 1 FROM entries) "
    "BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END",
}


def create_tables(connection: Connection) -> None:
    metadata.create_all(connection)
    for statement in TRIGGERS.values():
        connection.exec_driver_sql(statement)


def has_tables(connection: Connection) -> bool:
    found = connection.exec_driver_sql("SELECT name FROM sqlite_master WHERE type = 'table'").scalars()
    return set(metadata.tables) <= set(found)


def check_triggers(connection: Connection, path: Path) -> None:
    """The triggers that were made are there, and no others."""
    query = "SELECT name, sql FROM sqlite_master WHERE type = 'trigger'"
    found = {row.name: row.sql for row in connection.exec_driver_sql(query)}
    wrong = sorted(name for name in found.keys() | TRIGGERS.keys() if found.get(name) != TRIGGERS.get(name))
    if wrong:
        raise LedgerTampered(f"{path}: the guards of the ledger were changed: {', '.join(wrong)}")


def open_engine(path: Path, mode: str = "rw") -> Engine:
    """mode: ro, rw, or rwc for a new file."""
    address = f"file:{quote(str(path))}?mode={mode}"
    engine = create_engine(
        "sqlite://",
        creator=lambda: sqlite3.connect(
            address, uri=True, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
        ),
        poolclass=QueuePool,
    )

    @event.listens_for(engine, "connect")
    def _set_up(connection: sqlite3.Connection, _: object) -> None:
        for pragma in ("synchronous = FULL", "foreign_keys = ON", "cell_size_check = ON"):
            connection.execute(f"PRAGMA {pragma}")

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        if connection.get_execution_options().get("writes", False):
            _begin_writing(connection)
        else:
            connection.exec_driver_sql("BEGIN")

    return engine


def _begin_writing(connection: Connection) -> None:
    """Take the write lock. SQLite's own waiting backs off so far that one busy job keeps others out for seconds."""
    deadline = time.monotonic() + BUSY_TIMEOUT_S
    connection.exec_driver_sql("PRAGMA busy_timeout = 0")
    try:
        while True:
            try:
                connection.exec_driver_sql("BEGIN IMMEDIATE")
                return
            except OperationalError as error:
                if _code(error.orig) != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                    raise
            time.sleep(random.uniform(0.0002, 0.002))
    finally:
        connection.exec_driver_sql(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_S * 1000:.0f}")


@contextlib.contextmanager
def in_words(path: Path) -> Iterator[None]:
    """SQLite's errors as ours. The transaction was rolled back: the ledger holds what it held before."""
    try:
        yield
    except DBAPIError as error:
        raise _translated(path, error.orig) from None
    except sqlite3.Error as error:
        raise _translated(path, error) from None
    except UnicodeDecodeError as error:
        raise LedgerTampered(
            f"{path}: the ledger is damaged ({error.reason}). Put back the newest copy of it"
        ) from None


def _code(error: BaseException | None) -> int:
    return int(getattr(error, "sqlite_errorcode", 0)) & 0xFF


def _translated(path: Path, error: BaseException | None) -> FedplatError:
    match _code(error):
        case sqlite3.SQLITE_READONLY | sqlite3.SQLITE_PERM:
            return UsageError(f"{path}: the ledger is read-only. Nothing is trained without writing down what it costs")
        case sqlite3.SQLITE_CANTOPEN | sqlite3.SQLITE_AUTH:
            reason = (
                "it may not be read" if path.exists() and not os.access(path, os.R_OK) else "its folder is read-only?"
            )
            return UsageError(f"{path}: the ledger can't be opened ({reason})")
        case sqlite3.SQLITE_FULL:
            return JobError(f"{path}: the disk is full. Nothing was spent or lost; make room and start again")
        case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
            return JobError(f"{path}: another process has held the ledger for {BUSY_TIMEOUT_S:g} s. Try again")
        case sqlite3.SQLITE_NOTADB | sqlite3.SQLITE_CORRUPT:
            return LedgerTampered(f"{path}: the ledger is damaged ({error}). Put back the newest copy of it")
        case sqlite3.SQLITE_IOERR:
            return JobError(f"{path}: {error}. Nothing was spent or lost; look at the disk and start again")
    return JobError(f"{path}: {error}")
