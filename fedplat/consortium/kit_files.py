"""The kits as the programs that use them see them: the party's own TOML file, and where its keys and lists lie.

A kit is one directory. `SiteKit.load(folder)`, `ServerKit.load(folder)` and `OperatorKit.load(folder)` read it, and
refuse what they don't know; `load_kit` takes whichever it finds.
"""

from pathlib import Path
from typing import Annotated, ClassVar, Self

from pydantic import AfterValidator, Field

from fedplat.consortium.identity import SigningKey
from fedplat.consortium.issued import AccessList
from fedplat.consortium.keygen import IDENTITY_KEY, NODE_KEY, NODE_PUBLIC, SUPEREXEC_SECRET, TLS_KEY
from fedplat.consortium.roster import Hex32, PartyName, Roster, load_roster
from fedplat.consortium.spec import Host, Port, is_address, read_toml, validated
from fedplat.errors import UsageError
from fedplat.job_sections import Section


def _endpoint(value: str) -> str:
    host, _, port = value.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not bare or (":" in bare and bare == host) or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"must be host:port, e.g. 'fl.example.org:9443' or '[::1]:9443' (got {value!r})")
    return value


def _listen(value: str) -> str:
    if not is_address(value):
        raise ValueError(f"must be an IP address of this machine (got {value!r})")
    return value


def _user(value: str) -> str:
    if value.startswith("-") or any(not (c.isalnum() or c in "._-") for c in value):
        raise ValueError(f"must be the name of a user of this machine (got {value!r})")
    return value


Endpoint = Annotated[str, AfterValidator(_endpoint)]


class Kit(Section):
    """What all kits have."""

    FILE: ClassVar[str]
    TABLE: ClassVar[str]
    SECRETS: ClassVar[tuple[str, ...]]
    """Files that only the kit's owner may read."""

    folder: Path
    """The kit itself; not a key of the file."""
    name: PartyName
    consortium: PartyName
    authority: Hex32
    """Key that signs this consortium's rosters."""

    @classmethod
    def load(cls, folder: Path) -> Self:
        path = folder / cls.FILE
        table = read_toml(path, "It is part of the kit that `fedplat provision` made")
        own = table.get(cls.TABLE)
        if set(table) != {cls.TABLE} or not isinstance(own, dict) or "folder" in own:
            raise UsageError(f"{path}: must hold the one table [{cls.TABLE}], as `fedplat provision` wrote it")
        return validated(cls, {**own, "folder": folder.resolve()}, f"{path}: [{cls.TABLE}]")

    @property
    def ca(self) -> Path:
        return self.folder / "ca.crt"

    @property
    def certificate(self) -> Path:
        return self.folder / "tls.crt"

    @property
    def key(self) -> Path:
        """Private key of the certificate."""
        return self.folder / TLS_KEY

    @property
    def roster(self) -> Path:
        return self.folder / "roster.json"

    def load_roster(self) -> Roster:
        """The kit's roster, if this consortium's authority signed it."""
        roster = load_roster(self.roster, self.authority)
        if roster.consortium != self.consortium:
            raise UsageError(f"{self.roster}: is of consortium '{roster.consortium}', this kit of '{self.consortium}'")
        return roster


class _ClientKit(Kit):
    server: Endpoint
    """The server's front, as host:port."""

    @property
    def server_host(self) -> str:
        return self.server.rpartition(":")[0].strip("[]")

    @property
    def server_port(self) -> int:
        return int(self.server.rpartition(":")[2])

    @property
    def identity(self) -> Path:
        return self.folder / IDENTITY_KEY

    def signing_key(self) -> SigningKey:
        return SigningKey.load(self.identity)


class SiteKit(_ClientKit):
    FILE, TABLE, SECRETS = "federation.toml", "site", (IDENTITY_KEY, TLS_KEY, NODE_KEY, SUPEREXEC_SECRET)

    link_port: Port
    """Loopback port of the local proxy that adds this site's certificate."""
    node_port: Port
    """Loopback port of the SuperNode's Runtime API."""
    supernode_user: Annotated[str, Field(max_length=32), AfterValidator(_user)] = ""
    """User that the SuperNode runs as; must not be able to read data, keys and ledger."""

    @property
    def site_file(self) -> Path:
        """The site's own rules and budgets."""
        return self.folder / "site.toml"

    @property
    def node_key(self) -> Path:
        return self.folder / NODE_KEY

    @property
    def node_public(self) -> Path:
        return self.folder / NODE_PUBLIC

    @property
    def superexec_secret(self) -> Path:
        return self.folder / SUPEREXEC_SECRET

    @property
    def state_folder(self) -> Path:
        """Everything that the agent writes but the ledger."""
        return self.folder / "state"

    @property
    def local_certificate(self) -> Path:
        """What the SuperNode shows to the agent."""
        return self.state_folder / "local.crt"


class OperatorKit(_ClientKit):
    FILE, TABLE, SECRETS = "operator.toml", "operator", (IDENTITY_KEY, TLS_KEY)


class ServerKit(Kit):
    FILE, TABLE, SECRETS = "server.toml", "server", ("server.key",)

    host: Host
    """Name or address under which others reach the server."""
    port: Port
    """Port of the front."""
    listen: Annotated[str, AfterValidator(_listen)] = "0.0.0.0"
    """Address that the front listens on."""
    superlink_port: Port = 9444
    """Loopback port of the SuperLink."""
    data: str = "state"
    """Directory of everything that the server writes but runs, relative to this file."""
    runs: str = "runs"
    """Directory of run directories, relative to this file."""
    strategies: tuple[str, ...] = ()
    """Strategies `package.module:Class` that jobs may name besides the built-in ones."""

    @property
    def superlink_address(self) -> str:
        return f"127.0.0.1:{self.superlink_port}"

    @property
    def superexec_secret(self) -> Path:
        """Shared by SuperLink and executor."""
        return self.data_folder / SUPEREXEC_SECRET

    @property
    def certificate(self) -> Path:
        return self.folder / "server.crt"

    @property
    def key(self) -> Path:
        return self.folder / "server.key"

    @property
    def access(self) -> Path:
        return self.folder / "access.json"

    @property
    def data_folder(self) -> Path:
        return self.folder / self.data

    @property
    def runs_folder(self) -> Path:
        return self.folder / self.runs

    def load_access(self) -> AccessList:
        return AccessList.load(self.access)


def load_kit(folder: Path) -> SiteKit | ServerKit | OperatorKit:
    """The kit in a directory, whichever it is."""
    kinds = (SiteKit, ServerKit, OperatorKit)
    for kind in kinds:
        if (folder / kind.FILE).is_file():
            return kind.load(folder)
    raise UsageError(f"{folder}: not a kit: none of {', '.join(kind.FILE for kind in kinds)} is there")
