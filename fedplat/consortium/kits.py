"""`fedplat provision`: one kit per party, and every later change without re-issuing the rest.

    kits/authority         CA, roster key, record of what was issued: stays with whoever provisions
    kits/server            for the server's administrator
    kits/sites/NAME        for a site's
    kits/operators/NAME    for who submits jobs

Who is in consortium.toml and has no kit gets one. Nobody loses theirs by being deleted from the file: that takes a
revocation, which is for ever unless the party is rotated back in. A kit that was handed over and deleted here is not
made again.
"""

import contextlib
import datetime
import fcntl
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ec

from fedplat.consortium import kit_texts, units
from fedplat.consortium.authority import Authority, pem, serial_text, server_names
from fedplat.consortium.identity import write_secret
from fedplat.consortium.issued import AnyRole, Issued, IssuedParty, as_json
from fedplat.consortium.keygen import NODE_PUBLIC, PartyKeys, PublicBundle, load_bundle, private_pem
from fedplat.consortium.roster import load_roster
from fedplat.consortium.spec import SERVER, ConsortiumSpec, Role, ServerSection
from fedplat.consortium.staging import Staging, kit_folder, make_private, refresh
from fedplat.errors import UsageError, unknown_name
from fedplat.files import write_file

EXPIRES_SOON = datetime.timedelta(days=30)
SiteText = Callable[[str], str]
"""The site.toml of a site with this name."""


@dataclass(frozen=True)
class Provisioned:
    """What one call changed."""

    out: Path
    version: int
    """Of the roster."""
    issued: tuple[str, ...]
    rotated: tuple[str, ...]
    revoked: tuple[str, ...]
    remarks: tuple[str, ...]
    """What a person should know or do."""

    @property
    def changed(self) -> bool:
        return bool(self.issued or self.rotated or self.revoked)


def provision(
    spec: ConsortiumSpec,
    out: Path,
    site_text: SiteText,
    *,
    rotate: Sequence[str] = (),
    revoke: Sequence[str] = (),
) -> Provisioned:
    """Bring the kits in line with the consortium file."""
    make_private(out)
    with _alone(out):
        return _Provisioning(spec, out, site_text).run(tuple(rotate), tuple(revoke))


@contextlib.contextmanager
def _alone(out: Path) -> Iterator[None]:
    """Two that provision at once would issue two rosters of one version."""
    with (out / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"{out}: another `fedplat provision` is at work here. Try again when it is done") from None
        yield


class _Provisioning:
    """One call of `provision`."""

    def __init__(self, spec: ConsortiumSpec, out: Path, site_text: SiteText) -> None:
        self._spec, self._out, self._site_text = spec, out, site_text
        self._name, self._days = spec.consortium.name, spec.consortium.valid_days
        folder = out / "authority"
        self._authority = (Authority.load if folder.exists() else Authority.create)(folder, self._name)
        self._record = folder / "issued.json"
        self._issued = Issued.load(self._record, self._name)
        self._staging = Staging(out)
        self._staging.install(self._issued.parties)
        self._wanted = spec.parties()
        self._indices: dict[AnyRole, int] = {}

    def run(self, rotate: tuple[str, ...], revoke: tuple[str, ...]) -> Provisioned:
        self._check(rotate, revoke)
        known = self._issued.parties
        new = tuple(name for name in (SERVER, *self._wanted) if name not in known)
        parties = dict(known)
        for name in revoke:
            parties[name] = known[name].revoke()
        try:
            bundles = {name: self._bundle(name) for name in (*new, *rotate) if name != SERVER}
            for name in (*new, *rotate):
                parties[name] = self._stage(name, known.get(name), bundles.get(name))
            _require_own_keys(parties)
            self._commit(parties)
        finally:
            self._staging.install(self._issued.parties)
        self._distribute()
        return Provisioned(self._out, self._issued.version, new, rotate, revoke, tuple(self._remarks()))

    def _commit(self, parties: dict[str, IssuedParty]) -> None:
        if parties != self._issued.parties:
            now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
            version = self._issued.version + 1
            issued = Issued(consortium=self._name, version=version, changed=now, parties=parties)
            issued.save(self._record)
            self._issued = issued

    def _check(self, rotate: tuple[str, ...], revoke: tuple[str, ...]) -> None:
        """Everything that can be refused is refused before anything is written."""
        known = self._issued.parties
        for name in revoke:
            if name not in known or name == SERVER:
                raise UsageError(unknown_name("party", name, set(known) - {SERVER}))
            if known[name].revoked:
                raise UsageError(f"'{name}' is revoked already")
        for name in rotate:
            if name in revoke:
                raise UsageError(f"'{name}': either --revoke or --rotate")
            if name not in known or (name != SERVER and name not in self._wanted):
                raise UsageError(unknown_name("party", name, {SERVER} | (set(known) & set(self._wanted))))
        folded = {name.lower(): name for name in known}
        for name, (role, _) in self._wanted.items():
            earlier = folded.get(name.lower(), name)
            if earlier != name or (name in known and known[name].role != role):
                raise UsageError(f"'{name}' ({role}): '{earlier}' was a {known[earlier].role}. Choose another name")

    def _bundle(self, name: str) -> PublicBundle | None:
        _, party = self._wanted[name]
        return load_bundle(Path(party.public), name) if party.public else None

    def _stage(self, name: str, before: IssuedParty | None, bundle: PublicBundle | None) -> IssuedParty:
        """Write a party's new files beside its kit; gives what is to be recorded of it."""
        folder = self._staging.open(name)
        write_file(folder / "ca.crt", pem(self._authority.certificate))
        role: AnyRole = SERVER if name == SERVER else self._wanted[name][0]  # type: ignore[assignment]
        index = before.index if before else self._next_index(role)
        if role == "server":
            party = self._stage_server(folder)
        else:
            party = self._stage_client(folder, name, role, index, bundle)
        earlier = before.revoked_serials if before else ()
        if before and before.serial not in earlier:
            earlier = (*earlier, before.serial)
        return party.model_copy(update={"revoked_serials": earlier})

    def _next_index(self, role: AnyRole) -> int:
        index = self._indices.get(role, self._issued.next_index(role))
        self._indices[role] = index + 1
        return index

    def _stage_server(self, folder: Path) -> IssuedParty:
        server, key = self._spec.server, ec.generate_private_key(ec.SECP256R1())
        names = (server.host, *server.names)
        certificate = self._authority.issue_server(key.public_key(), names, self._days)
        write_secret(folder / "server.key", private_pem(key))
        texts = {
            "server.toml": kit_texts.server_toml(server, self._name, self._authority.public),
            "start.sh": kit_texts.start_script("server", "the server"),
            "systemd/fedplat-server.service": units.server_unit(self._name),
            "kubernetes/server.yaml": units.server_manifest(self._name, server.port),
        }
        _write_texts(folder, texts)
        write_file(folder / "server.crt", pem(certificate))
        return IssuedParty(
            role="server",
            index=0,
            serial=serial_text(certificate),
            expires=certificate.not_valid_after_utc.isoformat(),
            made_here=True,
            names=tuple(server_names(names)),
        )

    def _stage_client(
        self, folder: Path, name: str, role: Role, index: int, bundle: PublicBundle | None
    ) -> IssuedParty:
        if bundle is None:
            keys = PartyKeys.generate()
            keys.save(folder, role)
            public = keys.public(name)
        else:
            public = bundle
            if role == "site":
                write_file(folder / NODE_PUBLIC, public.node_public().encode() + b"\n")
        certificate = self._authority.issue_client(public.tls_public_key(), name, role, self._days)
        _write_texts(folder, self._site_texts(name, index) if role == "site" else self._operator_texts(name))
        write_file(folder / "tls.crt", pem(certificate))
        return IssuedParty(
            role=role,
            index=index,
            serial=serial_text(certificate),
            expires=certificate.not_valid_after_utc.isoformat(),
            made_here=bundle is None,
            identity=public.identity,
            node=public.node_public() if role == "site" else "",
        )

    def _site_texts(self, name: str, index: int) -> dict[str, str]:
        server, authority = self._spec.server, self._authority.public
        return {
            "federation.toml": kit_texts.federation_toml(name, index, server, self._name, authority),
            "site.toml": self._site_text(name),
            "start.sh": kit_texts.start_script("site", "the site agent and the SuperNode"),
            f"systemd/fedplat-site-{name}.service": units.site_unit(self._name, name),
            "kubernetes/site.yaml": units.site_manifest(self._name, name),
        }

    def _operator_texts(self, name: str) -> dict[str, str]:
        text = kit_texts.operator_toml(name, self._spec.server, self._name, self._authority.public)
        return {"operator.toml": text}

    def _distribute(self) -> None:
        """The roster to every kit that is still here, the access list to the server's."""
        master = self._authority.folder / "roster.json"
        if not master.exists() or load_roster(master, self._authority.public).version != self._issued.version:
            self._issued.roster(self._wanted).sign(self._authority.signing).save(master)
        content = master.read_bytes()
        for name, party in self._issued.parties.items():
            refresh(kit_folder(self._out, name, party.role) / "roster.json", content)
        access = as_json(self._issued.access().model_dump(mode="json"))
        for folder in (self._authority.folder, self._out / SERVER):
            refresh(folder / "access.json", access)

    def _remarks(self) -> Iterator[str]:
        soon = datetime.datetime.now(datetime.UTC) + EXPIRES_SOON
        for name, party in self._issued.parties.items():
            if party.revoked:
                if name in self._wanted:
                    yield f"'{name}' is revoked: delete it from the file, or let it in again with --rotate {name}"
                continue
            if datetime.datetime.fromisoformat(party.expires) < soon:
                yield f"the certificate of '{name}' expires {party.expires[:10]}: --rotate {name}"
            if name != SERVER and name not in self._wanted:
                yield f"'{name}' is no longer in the file but still takes part: --revoke {name}"
            elif name != SERVER and self._keys_differ(name, party):
                yield f"'{name}': its public keys in the file are not those that were issued: --rotate {name}"
        yield from self._server_remarks(self._spec.server, self._issued.parties[SERVER])

    def _keys_differ(self, name: str, party: IssuedParty) -> bool:
        bundle = self._bundle(name)
        return bundle is not None and (party.made_here or bundle.identity != party.identity)

    def _server_remarks(self, server: ServerSection, party: IssuedParty) -> Iterator[str]:
        if set(party.names) != set(server_names((server.host, *server.names))):
            yield (
                f"the server's names changed: --rotate {SERVER} issues a certificate for them. Kits keep the address "
                f"they were made with: set host, port and server in server.toml, federation.toml and operator.toml"
            )


def _require_own_keys(parties: dict[str, IssuedParty]) -> None:
    """Two parties with one key could speak for each other."""
    owners: dict[str, str] = {}
    for name, party in parties.items():
        for key in filter(None, (party.identity, party.node)):
            other = owners.setdefault(key, name)
            if other != name:
                raise UsageError(f"'{other}' and '{name}' have the same key. Each party makes its own")


def _write_texts(folder: Path, texts: dict[str, str]) -> None:
    for name, text in texts.items():
        path = folder / name
        make_private(path.parent)
        write_file(path, text.encode())
        if path.suffix == ".sh":
            path.chmod(0o755)
