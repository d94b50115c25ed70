"""The roster: all parties of a consortium with their public keys, signed by its authority.

Every party holds a copy and the authority's public key. A newer version replaces an older one wherever it comes from,
because nobody but the authority can make one; an older version never replaces a newer one, so a revocation stays.
"""

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedplat import canonical
from fedplat.consortium.identity import SigningKey, is_signed
from fedplat.errors import UsageError
from fedplat.files import write_file

NAME = r"^[A-Za-z0-9][A-Za-z0-9_-]{0,62}$"
PURPOSE = "roster"
Hex32 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
PartyName = Annotated[str, Field(pattern=NAME)]


class _Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class SiteEntry(_Frozen):
    """A site's public halves."""

    identity: Hex32
    """Ed25519 key that signs ledger heads."""
    node: str
    """The SuperNode's public key, in OpenSSH format."""


class OperatorEntry(_Frozen):
    """Somebody who may sign jobs."""

    identity: Hex32


class Roster(_Frozen):
    consortium: PartyName
    version: int = Field(ge=1)
    issued: str
    """UTC, ISO 8601."""
    sites: dict[PartyName, SiteEntry]
    """In the order of the consortium file. A revoked party is no longer here."""
    operators: dict[PartyName, OperatorEntry]

    def sign(self, authority: SigningKey) -> "SignedRoster":
        value = self.model_dump(mode="json")
        return SignedRoster(roster=self, signature=authority.sign(PURPOSE, value))


class SignedRoster(_Frozen):
    roster: Roster
    signature: str

    def verified(self, authority: str) -> Roster:
        if not is_signed(authority, self.signature, PURPOSE, self.roster.model_dump(mode="json")):
            raise UsageError("the roster is not signed by this consortium's authority")
        return self.roster

    def save(self, path: Path) -> None:
        write_file(path, (self.model_dump_json(indent=1) + "\n").encode())


def parse_roster(text: str) -> SignedRoster:
    try:
        return SignedRoster.model_validate(canonical.loads(text))
    except (ValueError, ValidationError) as error:
        raise UsageError(f"not a roster: {error}") from None


def load_roster(path: Path, authority: str) -> Roster:
    """The roster in a file, if the authority signed it."""
    try:
        return parse_roster(path.read_text(encoding="utf-8")).verified(authority)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}. It is part of the kit that `fedplat provision` made") from None
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None
