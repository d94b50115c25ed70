"""Signed heads of ledgers: what catches a site's ledger that was restored from a backup.

Every reply of a site carries a statement: the head of its own ledger and the newest heads it has heard of all others,
signed. The server relays statements; it can hold them back, but not change them. So each site's last head is known all
over the consortium, and a site that starts with an older ledger meets its own signature on a newer head.

Law: of two heads of one ledger, the one with the higher number must contain the other.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedplat import canonical
from fedplat.consortium.identity import SigningKey, is_signed
from fedplat.consortium.roster import Hex32, PartyName, Roster
from fedplat.errors import JobError
from fedplat.files import write_file

if TYPE_CHECKING:
    from privacy.ledger import Ledger

HEAD, STATEMENT = "ledger-head", "statement"


class _Signed(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    signature: str = ""

    def body(self) -> dict[str, object]:
        return self.model_dump(mode="json", exclude={"signature"})


class SignedHead(_Signed):
    """'My ledger has this many entries, and this is the hash over them.'"""

    site: PartyName
    ledger: str
    """The ledger's own random identity."""
    seq: int = Field(ge=0)
    hash: Hex32

    def is_genuine(self, roster: Roster) -> bool:
        owner = roster.sites.get(self.site)
        return owner is not None and is_signed(owner.identity, self.signature, HEAD, self.body())


class Statement(_Signed):
    """'At this time these were the newest heads that I knew, and this was my audit log.'"""

    site: PartyName
    time: float
    heads: tuple[SignedHead, ...]
    audit: Hex32
    """Hash of the last line of the site's audit log."""
    budget: dict[str, float] | None = None
    """ε that is left per account, where the site chooses to show it."""

    def is_genuine(self, roster: Roster) -> bool:
        speaker = roster.sites.get(self.site)
        return speaker is not None and is_signed(speaker.identity, self.signature, STATEMENT, self.body())

    def about(self, site: str) -> SignedHead | None:
        return next((head for head in self.heads if head.site == site), None)


def sign_head(key: SigningKey, site: str, ledger: "Ledger") -> SignedHead:
    head = ledger.head()
    unsigned = SignedHead(site=site, ledger=ledger.identity, seq=head.seq, hash=head.hash)
    return unsigned.model_copy(update={"signature": key.sign(HEAD, unsigned.body())})


def parse_statement(text: str) -> Statement | None:
    """A statement, or None for what is none: it comes through a server that nobody trusts."""
    try:
        return Statement.model_validate(canonical.loads(text))
    except (ValueError, ValidationError):
        return None


class KnownHeads:
    """The newest head of each site that this one has heard of, on disk."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._heads: dict[str, SignedHead] = {}
        if path.exists():
            try:
                stored = json.loads(path.read_text(encoding="utf-8"))
                self._heads = {name: SignedHead.model_validate(head) for name, head in stored.items()}
            except (ValueError, AttributeError, ValidationError) as error:
                raise JobError(f"{path}: can't be read ({error}). Put it back from the newest copy") from None

    def all(self) -> Mapping[str, SignedHead]:
        return self._heads

    def hear(self, heads: Iterable[SignedHead], roster: Roster) -> list[str]:
        """Remember newer heads; returns what contradicts what was heard before."""
        alarms, changed = [], False
        for head in heads:
            if not head.is_genuine(roster):
                continue
            known = self._heads.get(head.site)
            if known is not None and known.ledger == head.ledger and known.seq == head.seq and known.hash != head.hash:
                alarms.append(f"site '{head.site}' has signed two different ledgers with {head.seq} entries")
            if known is None or known.ledger != head.ledger or head.seq > known.seq:
                if known is not None and known.ledger != head.ledger:
                    alarms.append(f"site '{head.site}' has another ledger than before")
                self._heads[head.site], changed = head, True
        if changed:
            stored = {name: head.model_dump(mode="json") for name, head in sorted(self._heads.items())}
            write_file(self._path, json.dumps(stored).encode(), mode=0o600)
        return alarms


def require_newest(ledger: "Ledger", own: SignedHead) -> None:
    """Refuse to go on with a ledger that is older than what its own site has signed, or another one."""
    if own.ledger != ledger.identity:
        raise JobError(
            f"{ledger.path}: other sites know another ledger of this site, with {own.seq} entries. "
            "Put the original ledger back: a new one would forget what was spent"
        )
    if not ledger.contains(own.seq, own.hash):
        raise JobError(
            f"{ledger.path}: this ledger is older than what other sites have seen of it ({own.seq} entries), or was "
            "changed: it looks like a restored backup. Put back the newest copy; nothing is trained before"
        )
