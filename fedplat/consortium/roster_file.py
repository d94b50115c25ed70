"""A party's own copy of the roster: it goes forward, never back."""

from pathlib import Path

from fedplat.consortium.roster import Roster, load_roster, parse_roster
from fedplat.errors import UsageError


class RosterFile:
    """The roster on disk, and the newest genuine one that was offered since."""

    def __init__(self, path: Path, authority: str) -> None:
        self._path, self._authority = path, authority
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
        if roster.consortium != self.current.consortium or roster.version <= self.current.version:
            return False
        signed.save(self._path)
        self.current = roster
        return True

    def refresh(self) -> Roster:
        """The roster as the file has it now (somebody may have put a newer one there), if it is not older."""
        found = load_roster(self._path, self._authority)
        if found.version > self.current.version:
            self.current = found
        return self.current

    def text(self) -> str:
        return self._path.read_text(encoding="utf-8")
