"""The site's durable record of what it was asked and what it answered.

Law: the same identity and the same request get the same reply, bit for bit, at no cost; the same identity with another
request is refused. The record is on disk before anything is computed, the reply before anything is charged as
released, so a crash at any moment leaves a state from which the same request goes on. Replies of a job that nobody has
asked about for a month are deleted; that they were given is never forgotten.
"""

import json
import shutil
import sqlite3
import time
from pathlib import Path
from typing import Literal

import safetensors.numpy
from flwr.app import RecordDict

from client_app.keeping import Keeping
from fedplat.errors import UsageError
from fedplat.files import write_directory
from fedplat.records import decode_records, encode_records
from fedplat.wire import Identity

Kind = Literal["train", "evaluate"]
KEPT_ROUNDS = 3
"""Replies to older rounds are deleted: a server that asks for them again has lost more than a message."""
_SCHEMA = """
CREATE TABLE IF NOT EXISTS requests (
    job TEXT NOT NULL, round INTEGER NOT NULL, attempt INTEGER NOT NULL, kind TEXT NOT NULL,
    digest TEXT NOT NULL, asked REAL NOT NULL, answered REAL,
    PRIMARY KEY (job, round, attempt, kind)
) STRICT
"""


class ReplyStore:
    """One open store, used by one process at a time."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder = folder
        self._database = sqlite3.connect(folder / "requests.sqlite", timeout=10, isolation_level=None)
        self._database.execute("PRAGMA journal_mode=WAL")
        self._database.execute("PRAGMA synchronous=FULL")
        self._database.execute(_SCHEMA)
        self._keeping = Keeping(folder, "[0-9a-f]" * 32)

    def close(self) -> None:
        self._database.close()

    def begin(self, identity: Identity, kind: Kind, digest: str) -> RecordDict | None:
        """Note the request; returns the reply if it was answered before."""
        self._keeping.use(self._folder / identity.job[:32])
        key = (identity.job, identity.round, identity.attempt, kind)
        where = "job = ? AND round = ? AND attempt = ? AND kind = ?"
        found = self._database.execute(f"SELECT digest, answered FROM requests WHERE {where}", key).fetchone()
        if found is None:
            self._database.execute("INSERT INTO requests VALUES (?, ?, ?, ?, ?, ?, NULL)", (*key, digest, time.time()))
            return None
        if found[0] != digest:
            raise UsageError(
                f"round {identity.round}, attempt {identity.attempt} was asked for before with another model: "
                "one identity has one request. Submit a new job (another job.name or job.seed)"
            )
        return self._read(identity, kind) if found[1] is not None else None

    def write(self, identity: Identity, kind: Kind, reply: RecordDict) -> None:
        """Write the reply down; from now on this request has no other answer."""
        layout, arrays = encode_records(reply)
        files = {"layout.json": json.dumps(layout).encode(), "arrays.safetensors": safetensors.numpy.save(arrays)}
        path = self._path(identity, kind)
        if not path.exists():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_directory(path, files)

    def settle(self, identity: Identity, kind: Kind) -> None:
        """The reply may leave: it is paid for."""
        self._database.execute(
            "UPDATE requests SET answered = ? WHERE job = ? AND round = ? AND attempt = ? AND kind = ?",
            (time.time(), identity.job, identity.round, identity.attempt, kind),
        )
        self._forget(identity)

    def kept(self, identity: Identity, kind: Kind) -> RecordDict | None:
        """A reply that was written before a crash, perhaps before it was noted as answered."""
        return self._read(identity, kind) if self._path(identity, kind).exists() else None

    def count(self, job: str, kind: Kind) -> int:
        query = "SELECT count(*) FROM requests WHERE job = ? AND kind = ?"
        return int(self._database.execute(query, (job, kind)).fetchone()[0])

    def knows(self, job: str) -> bool:
        return self._database.execute("SELECT 1 FROM requests WHERE job = ? LIMIT 1", (job,)).fetchone() is not None

    def _read(self, identity: Identity, kind: Kind) -> RecordDict:
        path = self._path(identity, kind)
        try:
            layout = json.loads((path / "layout.json").read_text(encoding="utf-8"))
            arrays = safetensors.numpy.load_file(path / "arrays.safetensors")
        except (OSError, ValueError, safetensors.SafetensorError) as error:
            raise UsageError(
                f"round {identity.round} was answered before, and the reply is no longer kept ({error})"
            ) from None
        return decode_records(layout, arrays)

    def _path(self, identity: Identity, kind: Kind) -> Path:
        return self._folder / identity.job[:32] / f"{identity.round:06d}-{identity.attempt}-{kind}"

    def _forget(self, identity: Identity) -> None:
        for path in (self._folder / identity.job[:32]).iterdir():
            if not path.name.startswith(".") and int(path.name.partition("-")[0]) <= identity.round - KEPT_ROUNDS:
                shutil.rmtree(path, ignore_errors=True)
