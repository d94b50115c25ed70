"""consortium.toml: who takes part and where the server is. The only thing that `fedplat provision` is told.

A party's name becomes a directory, a certificate's subject and a key of the roster, so it is held to one narrow
alphabet, and two names that some file system can't tell apart are one name.
"""

import ipaddress
import re
import tomllib
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import AfterValidator, Field, StrictInt, ValidationError, model_validator

from fedplat.consortium.roster import PartyName
from fedplat.errors import UsageError
from fedplat.job_errors import describe_errors
from fedplat.job_sections import Section

Role = Literal["site", "operator"]
SERVER = "server"
RESERVED = frozenset({SERVER, "authority"})
TEMPLATE = """\
# Who takes part. `fedplat provision` reads this file and makes one kit per party; run it again after each edit.

[consortium]
name = "my-consortium"
valid_days = 365                  # of certificates; `fedplat doctor` warns before they expire

[server]
host = "127.0.0.1"                # the name or address under which sites and operators reach the server
port = 9443
names = []                        # further names and addresses for its certificate

[[sites]]
name = "site-1"
# public = "site-1.public.json"   # made at the site with `fedplat site keygen site-1`: its keys never leave it

[[sites]]
name = "site-2"

[[operators]]                     # who may submit jobs
name = "operator-1"
# public = "operator-1.public.json"
"""
_LABEL = r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_DNS_NAME = re.compile(rf"{_LABEL}(\.{_LABEL})*")
Port = Annotated[StrictInt, Field(ge=1, le=65535)]


def is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _host(value: str) -> str:
    if not is_address(value) and (len(value) > 253 or not _DNS_NAME.fullmatch(value)):
        raise ValueError(f"must be a host name or an IP address, without scheme or port (got {value!r})")
    return value


Host = Annotated[str, AfterValidator(_host)]


class ConsortiumSection(Section):
    """The consortium itself."""

    name: PartyName
    """Name of the consortium; it can't change once keys were issued."""
    valid_days: StrictInt = Field(365, ge=1, le=3650)
    """How long a certificate is valid."""


class ServerSection(Section):
    """Where the server is."""

    host: Host
    """Name or address under which sites and operators reach it."""
    port: Port = 9443
    """Port of its front."""
    names: tuple[Host, ...] = ()
    """Further names and addresses of its certificate."""


class PartySection(Section):
    """A site or an operator."""

    name: PartyName
    """Name of the party, unique in the consortium."""
    public: str | None = None
    """The NAME.public.json that `fedplat site keygen` wrote at the party, relative to this file. Without one,
    provisioning makes the party's private keys."""


class ConsortiumSpec(Section):
    consortium: ConsortiumSection
    server: ServerSection
    sites: tuple[PartySection, ...] = ()
    operators: tuple[PartySection, ...] = ()

    @model_validator(mode="after")
    def _unique_names(self) -> "ConsortiumSpec":
        seen: dict[str, str] = {}
        for party in (*self.sites, *self.operators):
            folded = party.name.lower()
            if folded in RESERVED:
                raise ValueError(f"'{party.name}' is a reserved name: choose another for this party")
            if folded in seen:
                raise ValueError(f"'{seen[folded]}' and '{party.name}': every party needs a name of its own")
            seen[folded] = party.name
        return self

    def parties(self) -> dict[str, tuple[Role, PartySection]]:
        """All parties but the server, in the order of the file."""
        sites: dict[str, tuple[Role, PartySection]] = {party.name: ("site", party) for party in self.sites}
        return sites | {party.name: ("operator", party) for party in self.operators}


def load_spec(path: Path) -> ConsortiumSpec:
    """The consortium file, with the paths of public bundles resolved."""
    spec = validated(ConsortiumSpec, read_toml(path, "Write one with: fedplat provision --init"), path)

    def resolved(parties: tuple[PartySection, ...]) -> tuple[PartySection, ...]:
        return tuple(
            party.model_copy(update={"public": str(path.parent / party.public)}) if party.public else party
            for party in parties
        )

    return spec.model_copy(update={"sites": resolved(spec.sites), "operators": resolved(spec.operators)})


def read_toml(path: Path, if_missing: str) -> dict[str, object]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file. {if_missing}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: can't be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path}: not valid TOML: {error}") from None


M = TypeVar("M", bound=Section)


def validated(model: type[M], value: object, where: Path | str) -> M:
    """The value as this model, or one sentence per problem that names the file."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise UsageError(f"{where}: {describe_errors(error, model)}") from None
