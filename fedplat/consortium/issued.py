"""What the authority has issued: `authority/issued.json`, from which roster and access list follow.

It is the one record that a crash must not tear: everything else that provisioning writes can be derived from it again,
or is thrown away because it is not in it.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from fedplat.consortium.roster import OperatorEntry, PartyName, Roster, SiteEntry
from fedplat.consortium.spec import validated
from fedplat.errors import UsageError
from fedplat.files import write_file
from fedplat.job_sections import Section

Serial = Annotated[str, Field(pattern=r"^([0-9A-F]{2}){1,20}$")]
AnyRole = Literal["site", "operator", "server"]


class IssuedParty(Section):
    role: AnyRole
    index: int
    """Order of arrival; a site's default ports follow from it."""
    serial: Serial
    """Of the current certificate."""
    expires: str
    """UTC, ISO 8601."""
    made_here: bool
    """Provisioning made its private keys; else the party did."""
    identity: str = ""
    node: str = ""
    names: tuple[str, ...] = ()
    """Names of the server's certificate."""
    revoked: bool = False
    revoked_serials: tuple[Serial, ...] = ()

    def revoke(self) -> "IssuedParty":
        return self.model_copy(update={"revoked": True, "revoked_serials": (*self.revoked_serials, self.serial)})


class AccessEntry(Section):
    name: PartyName
    role: Literal["site", "operator"]


class AccessList(Section):
    """Which certificates the server's front lets in, as what."""

    serials: dict[Serial, AccessEntry]

    @classmethod
    def load(cls, path: Path) -> "AccessList":
        return validated(cls, read_json(path), path)


class Issued(Section):
    consortium: PartyName
    version: int = 0
    """Of the roster; every change raises it."""
    changed: str = ""
    """When that version was made."""
    parties: dict[str, IssuedParty] = Field(default_factory=dict)

    @classmethod
    def load(cls, path: Path, consortium: str) -> "Issued":
        if not path.exists():
            return cls(consortium=consortium)
        issued = validated(cls, read_json(path), path)
        if issued.consortium != consortium:
            raise UsageError(f"{path}: belongs to consortium '{issued.consortium}', not to '{consortium}'")
        return issued

    def save(self, path: Path) -> None:
        write_file(path, as_json(self.model_dump(mode="json")))

    def active(self, role: AnyRole) -> dict[str, IssuedParty]:
        return {name: party for name, party in self.parties.items() if party.role == role and not party.revoked}

    def next_index(self, role: AnyRole) -> int:
        return 1 + max((party.index for party in self.parties.values() if party.role == role), default=-1)

    def roster(self, order: Iterable[str]) -> Roster:
        """Everybody who was not revoked: first in the order of the consortium file, then who is no longer in it."""
        sites, operators = self.active("site"), self.active("operator")
        names = list(dict.fromkeys([*order, *sites, *operators]))
        return Roster(
            consortium=self.consortium,
            version=self.version,
            issued=self.changed,
            sites={n: SiteEntry(identity=sites[n].identity, node=sites[n].node) for n in names if n in sites},
            operators={n: OperatorEntry(identity=operators[n].identity) for n in names if n in operators},
        )

    def access(self) -> AccessList:
        clients = {**self.active("site"), **self.active("operator")}
        return AccessList(
            serials={
                party.serial: AccessEntry(name=name, role="site" if party.role == "site" else "operator")
                for name, party in clients.items()
            }
        )


def as_json(value: object) -> bytes:
    return (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode()


def read_json(path: Path) -> object:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: can't be read: {error}") from None
