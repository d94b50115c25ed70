"""A party's own copy of the roster: it goes forward, never back."""

import contextlib
from pathlib import Path

from fedplat.consortium.roster import Roster, load_roster, parse_roster
from fedplat.errors import UsageError


class RosterFile:
    """The roster on disk, and the newest genuine one that was offered since."""

    def __init__(self, path: Path, authority: str) -> None:
        self._path, self._authority = path, authority
        self._seen = self._stamp()
        self.current: Roster = load_roster(path, authority)

    def offer(self, text: str) -> bool:
        """Take over a newer roster; anything else is ignored. It may come from anybody: only the authority signs."""
        if not text:
            return False
        try:
            signed = parse_roster(text)
            roster = signed.verified(self._authority)
        except UsageError:
            return False
        known = self.newest()  # somebody may have put a newer one there than this process has read
        if roster.consortium != known.consortium or roster.version <= known.version:
            return False
        signed.save(self._path)
        self.current = roster
        return True

    def newest(self) -> Roster:
        """The newer of what is known here and what the file has now. A file that is no roster changes nothing."""
        with contextlib.suppress(UsageError):
            self.refresh()
        return self.current

    def refresh(self) -> Roster:
        """The roster as the file has it now (somebody may have put a newer one there), if it is not older."""
        stamp = self._stamp()
        if stamp is None or stamp != self._seen:
            found = load_roster(self._path, self._authority)
            if found.consortium == self.current.consortium and found.version > self.current.version:
                self.current = found
            self._seen = stamp
        return self.current

    def _stamp(self) -> tuple[int, int, int] | None:
        """Changes with the file, so that it is read only then."""
        try:
            stat = self._path.stat()
        except OSError:
            return None
        return stat.st_mtime_ns, stat.st_size, stat.st_ino

    def text(self) -> str:
        return self._path.read_text(encoding="utf-8")
