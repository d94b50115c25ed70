"""The site's audit log: every decision about a request, append-only and hash-chained.

One JSON object per line; each carries the hash of the line before. A changed, removed or inserted line breaks the chain
from there on; lines cut off the end don't show here, which is why the newest hash is also signed into every reply.
"""

import errno
import hashlib
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from fedplat import canonical
from fedplat.errors import JobError

Decision = Literal["started", "admitted", "refused", "repeated", "released", "failed", "alarm", "roster", "stopped"]
START = "0" * 64


class AuditLog:
    """One open log. A line that a crash left half written is cut off: it was never acted on."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        self.seq, self.head = _last(path)

    def note(self, decision: Decision, reason: str = "", about: Mapping[str, str | int] | None = None) -> None:
        """Write a decision down, durably, before it takes effect."""
        entry = {"seq": self.seq + 1, "time": time.time(), "decision": decision, "reason": reason, **(about or {})}
        line = canonical.dumps(entry | {"previous": self.head})
        self._write(line.encode() + b"\n")
        self.seq, self.head = self.seq + 1, hashlib.sha256(line.encode()).hexdigest()

    def _write(self, line: bytes) -> None:
        end = os.fstat(self._file).st_size
        try:
            if os.write(self._file, line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fdatasync(self._file)
        except OSError as error:
            os.truncate(self._file, end)  # a full disk must not leave half a line behind
            raise JobError(f"{self.path}: can't be written: {error.strerror}. Nothing is served before") from None

    def close(self) -> None:
        os.close(self._file)


def read_audit(path: Path) -> list[dict[str, Any]]:
    """All decisions, oldest first, if the chain holds."""
    found, head = [], START
    for number, line in enumerate(_lines(path), start=1):
        try:
            entry = json.loads(line)
        except ValueError:
            entry = {}
        if not isinstance(entry, dict) or entry.get("previous") != head or entry.get("seq") != number:
            raise JobError(f"{path}: line {number} does not follow from the one before: the audit log was changed")
        found.append(entry)
        head = hashlib.sha256(line).hexdigest()
    return found


def _lines(path: Path) -> list[bytes]:
    content = path.read_bytes()
    return content.split(b"\n")[:-1]


def _last(path: Path) -> tuple[int, str]:
    """Number and hash of the last line; a torn one is cut off, it was never acted on."""
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        os.truncate(path, whole)
    lines = content[:whole].split(b"\n")[:-1]
    if not lines:
        return 0, START
    try:
        return int(json.loads(lines[-1])["seq"]), hashlib.sha256(lines[-1]).hexdigest()
    except (ValueError, KeyError, TypeError):
        raise JobError(f"{path}: the last line is damaged. Move the log away and tell your auditor") from None
