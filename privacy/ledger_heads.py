"""Signed heads of ledgers: what catches a site's ledger that was restored from a backup.

Every reply of a site carries a statement: the head of its own ledger and the newest heads it has heard of all others,
signed. The server relays statements; it can hold them back, but not change them. So each site's last head is known all
over the consortium, and a site that starts with an older ledger meets its own signature on a newer head.

Statements also say that they are fresh: each carries a number that its site drew when it started, and the numbers that
the speaker has heard from others. A site that finds its own number in another's statement knows that this other spoke
after hearing what this site says of its ledger now.

Law: of two heads of one ledger, the one with the higher number must contain the other. What was heard is not forgotten.
"""

import json
import time as clock
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, StringConstraints, ValidationError, field_validator

from fedplat import canonical
from fedplat.consortium.identity import SigningKey, is_signed
from fedplat.consortium.roster import Hex32, PartyName, Roster
from fedplat.errors import JobError
from fedplat.files import write_file

if TYPE_CHECKING:
    from privacy.ledger import Ledger

HEAD, STATEMENT = "ledger-head", "statement"
LARGEST_STATEMENT = 1 << 16
MOST_HEADS, MOST_BUDGETS = 256, 64
FUTURE_S = 300.0
"""How far another site's clock may be ahead."""
MOST_LEDGERS = 16
"""Ledgers of one site that are remembered. Two are an alarm already, and only the first is told to others."""
ALARM_EVERY_S = 3600.0
Nonce = Annotated[str, StringConstraints(pattern=r"^([0-9a-f]{32})?$")]


class _Signed(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    signature: str = Field("", max_length=128)

    def body(self) -> dict[str, object]:
        return self.model_dump(mode="json", exclude={"signature"})


class SignedHead(_Signed):
    """'My ledger has this many entries, and this is the hash over them.'"""

    site: PartyName
    ledger: str = Field(max_length=64)
    """The ledger's own random identity."""
    seq: int = Field(ge=0, lt=2**63)
    hash: Hex32

    def is_genuine(self, roster: Roster) -> bool:
        owner = roster.sites.get(self.site)
        return owner is not None and is_signed(owner.identity, self.signature, HEAD, self.body())


class Statement(_Signed):
    """'At this time these were the newest heads that I knew, and this was my audit log.'"""

    site: PartyName
    time: FiniteFloat
    heads: tuple[SignedHead, ...] = Field(max_length=MOST_HEADS)
    """At most one of each site."""
    audit: Hex32
    """Hash of the last line of the site's audit log."""
    budget: dict[str, FiniteFloat] | None = Field(None, max_length=MOST_BUDGETS)
    """ε that is left per account, where the site chooses to show it."""
    nonce: Nonce = ""
    """Random, drawn when the speaker's agent started."""
    heard: dict[PartyName, Nonce] = Field(default_factory=dict, max_length=MOST_HEADS)
    """The nonce of the newest statement that the speaker has heard of each other site."""

    @field_validator("heads")
    @classmethod
    def _one_of_each(cls, heads: tuple[SignedHead, ...]) -> tuple[SignedHead, ...]:
        if len({head.site for head in heads}) != len(heads):
            raise ValueError("two heads of one site")
        return heads

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
    if len(text) > LARGEST_STATEMENT:
        return None
    try:
        told = Statement.model_validate(canonical.loads(text))
    except (ValueError, ValidationError, RecursionError):
        return None
    return told if told.time <= clock.time() + FUTURE_S else None


class KnownHeads:
    """The newest head of each ledger of each site that this one has heard of, on disk. None is ever forgotten."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._heads: dict[str, dict[str, SignedHead]] = {}
        self._alarmed: dict[str, float] = {}
        if path.exists():
            try:
                stored = json.loads(path.read_text(encoding="utf-8"))
                for site, heads in stored.items():
                    if not isinstance(heads, list) or not heads:
                        raise ValueError(f"no heads of '{site}'")
                    read = [SignedHead.model_validate(head) for head in heads]
                    self._heads[site] = {head.ledger: head for head in read}
            except (ValueError, AttributeError, TypeError, ValidationError) as error:
                raise JobError(f"{path}: can't be read ({error}). Put it back from the newest copy") from None

    def all(self) -> Mapping[str, SignedHead]:
        """One head of each site: the newest of the ledger that was heard of first."""
        return {site: next(iter(ledgers.values())) for site, ledgers in self._heads.items() if ledgers}

    def of(self, site: str) -> list[SignedHead]:
        """The newest head of every ledger of a site."""
        return list(self._heads.get(site, {}).values())

    def hear(self, heads: Iterable[SignedHead], roster: Roster) -> list[str]:
        """Remember newer heads; returns what contradicts what was heard before, of each site at most once an hour."""
        alarms: dict[str, str] = {}
        changed = False
        for head in heads:
            ledgers = self._heads.get(head.site, {})
            known = ledgers.get(head.ledger)
            if _is_old(head, known) or not head.is_genuine(roster):  # what is known costs no signature
                continue
            if known is not None and known.seq == head.seq and known.hash != head.hash:
                alarms[head.site] = f"site '{head.site}' has signed two different ledgers with {head.seq} entries"
                continue
            if known is None and ledgers:
                alarms[head.site] = f"site '{head.site}' has another ledger than before"
            if known is not None or len(ledgers) < MOST_LEDGERS:
                self._heads.setdefault(head.site, {})[head.ledger], changed = head, True
        if changed:
            self._save()
        return [text for site, text in alarms.items() if self._may_alarm(site)]

    def _may_alarm(self, site: str) -> bool:
        now = clock.monotonic()
        if site in self._alarmed and now - self._alarmed[site] < ALARM_EVERY_S:
            return False
        self._alarmed[site] = now
        return True

    def _save(self) -> None:
        stored = {
            site: [head.model_dump(mode="json") for head in ledgers.values()]
            for site, ledgers in sorted(self._heads.items())
        }
        write_file(self._path, json.dumps(stored).encode(), mode=0o600)


def _is_old(head: SignedHead, known: SignedHead | None) -> bool:
    return known is not None and (head.seq < known.seq or head == known)


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
