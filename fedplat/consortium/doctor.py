"""`fedplat doctor`: everything about a kit that can be wrong before a job is, each with what to do about it.

A check is a plain function that yields results, so each can be tested alone; none of them changes anything.
"""

import datetime
import platform
import ssl
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization

from fedplat import __version__
from fedplat.consortium.authority import load_certificate
from fedplat.consortium.file_access import Credentials, can_read, can_replace, has_access_list
from fedplat.consortium.front import allowed_paths, find_nginx
from fedplat.consortium.identity import SigningKey
from fedplat.consortium.kit_files import Kit, OperatorKit, ServerKit, SiteKit
from fedplat.consortium.reach import ask_front, client_context
from fedplat.consortium.roster import Roster
from fedplat.errors import UsageError

Level = Literal["ok", "warning", "fail"]
FLOWER = "1.41."
EXPIRES_SOON = datetime.timedelta(days=30)
CLOCK_WARNING_S, CLOCK_FAIL_S = 5.0, 240.0


@dataclass(frozen=True)
class Finding:
    level: Level
    what: str
    detail: str
    """What was seen and, unless it is ok, what to do."""


def examine(kit: Kit, guarded: Sequence[Path] = (), *, same_user: bool = False, offline: bool = False) -> list[Finding]:
    """All findings about a kit. `guarded` are the site's data and ledger, which its SuperNode must not read."""
    checks: list[tuple[str, Callable[[], Iterator[Finding]]]] = [
        ("versions", lambda: versions(isinstance(kit, ServerKit))),
        ("permissions", lambda: permissions(kit)),
        ("certificate", lambda: certificate(kit)),
        ("roster", lambda: membership(kit)),
    ]
    if isinstance(kit, SiteKit):
        checks.append(("isolation", lambda: isolation(kit, guarded, same_user)))
    if not offline:
        checks.append(("server", lambda: reachability(kit)))
    return [finding for what, check in checks for finding in _safely(what, check)]


def _safely(what: str, check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """A check that can't be made has failed."""
    try:
        yield from check()
    except UsageError as error:
        yield Finding("fail", what, str(error))
    except OSError as error:
        yield Finding("fail", what, f"{error.filename or ''}: {error.strerror or error}".lstrip(": "))


def versions(server: bool) -> Iterator[Finding]:
    try:
        flower = version("flwr")
    except PackageNotFoundError:
        flower = "none"
    if flower.startswith(FLOWER):
        yield Finding("ok", "versions", f"fedplat {__version__}, flwr {flower}, Python {platform.python_version()}")
    else:
        yield Finding("fail", "versions", f"flwr {flower}: fedplat needs {FLOWER}*. pip install 'flwr=={FLOWER}*'")
    if server:
        nginx = find_nginx()
        if nginx:
            yield Finding("ok", "nginx", nginx)
        else:
            yield Finding("fail", "nginx", "not installed: the server's front needs it. apt-get install nginx-light")


def permissions(kit: Kit) -> Iterator[Finding]:
    """Secrets are their owner's alone."""
    fine = True
    for path in (kit.folder / name for name in kit.SECRETS):
        if not path.is_file():
            fine = False
            yield Finding("fail", "permissions", f"{path} is missing. Copy it here from where the keys were made")
            continue
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode & 0o077:
            fine = False
            yield Finding("fail", "permissions", f"{path}: mode {mode:04o}, others can read it. chmod 600 {path}")
    mode = stat.S_IMODE(kit.folder.stat().st_mode)
    if mode & 0o022:
        fine = False
        yield Finding(
            "fail", "permissions", f"{kit.folder}: mode {mode:04o}, others can replace what is in it. chmod 700"
        )
    if fine:
        yield Finding("ok", "permissions", f"{len(kit.SECRETS)} secret files, readable by their owner alone")


def certificate(kit: Kit, now: datetime.datetime | None = None) -> Iterator[Finding]:
    """In force, issued by this consortium, for this party, and the key is its own."""
    now = now or datetime.datetime.now(datetime.UTC)
    own, ca = load_certificate(kit.certificate), load_certificate(kit.ca)
    yield _lifetime("certificate", own, now)
    yield _lifetime("CA", ca, now)
    try:
        own.verify_directly_issued_by(ca)
        yield Finding("ok", "chain", f"issued by the CA of '{kit.consortium}'")
    except (InvalidSignature, ValueError, TypeError):
        yield Finding("fail", "chain", f"{kit.certificate} was not issued by {kit.ca}. Take both from one kit")
    try:
        key = serialization.load_pem_private_key(kit.key.read_bytes(), password=None)
        same = _spki(key.public_key()) == _spki(own.public_key())
    except ValueError as error:
        yield Finding("fail", "key", f"{kit.key}: can't be read as a private key: {error}")
        return
    if same:
        yield Finding("ok", "key", "belongs to the certificate")
    else:
        yield Finding("fail", "key", f"{kit.key} is not the key of {kit.certificate}. Take both from one kit")


def _spki(key: object) -> bytes:
    public: bytes = key.public_bytes(  # type: ignore[attr-defined]
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return public


def _lifetime(what: str, certificate: x509.Certificate, now: datetime.datetime) -> Finding:
    start, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if now > end:
        return Finding("fail", what, f"expired {end:%Y-%m-%d}. Ask for a new one: fedplat provision --rotate")
    if now < start:
        return Finding("fail", what, f"not valid before {start:%Y-%m-%d %H:%M} UTC. Is this machine's clock right?")
    if end - now < EXPIRES_SOON:
        days = (end - now).days
        return Finding("warning", what, f"expires in {days} days. Ask for a new one: fedplat provision --rotate")
    return Finding("ok", what, f"valid until {end:%Y-%m-%d}")


def membership(kit: Kit) -> Iterator[Finding]:
    """The roster is the authority's, and this party is in it with the keys it holds."""
    roster = kit.load_roster()
    parties = f"{len(roster.sites)} sites, {len(roster.operators)} operators"
    yield Finding("ok", "roster", f"version {roster.version} of '{roster.consortium}': {parties}")
    if isinstance(kit, SiteKit | OperatorKit):
        yield _own_entry(kit, roster)
    if isinstance(kit, ServerKit):
        yield Finding("ok", "access list", f"{len(kit.load_access().serials)} certificates")


def _own_entry(kit: SiteKit | OperatorKit, roster: Roster) -> Finding:
    entry = (roster.sites if isinstance(kit, SiteKit) else roster.operators).get(kit.name)
    if entry is None:
        return Finding("fail", "identity", f"'{kit.name}' is not in the roster: it was revoked, or the roster is old")
    if SigningKey.load(kit.identity).public != entry.identity:
        return Finding("fail", "identity", f"{kit.identity} is not the key that the roster lists for '{kit.name}'")
    if isinstance(kit, SiteKit) and _node_public(kit) != roster.sites[kit.name].node:
        return Finding("fail", "identity", f"{kit.node_key} is not the node key that the roster lists for '{kit.name}'")
    return Finding("ok", "identity", f"'{kit.name}' is in the roster with the keys of this kit")


def _node_public(kit: SiteKit) -> str:
    try:
        key = serialization.load_ssh_private_key(kit.node_key.read_bytes(), password=None)
    except ValueError as error:
        raise UsageError(f"{kit.node_key}: can't be read as an OpenSSH key: {error}") from None
    return key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH).decode()


def isolation(kit: SiteKit, guarded: Sequence[Path], same_user: bool) -> Iterator[Finding]:
    """The SuperNode's user can neither read nor replace the site's data, keys, rules and ledger."""
    if not kit.supernode_user:
        yield Finding(
            "warning" if same_user else "fail",
            "isolation",
            "the SuperNode runs as the agent's user and can read data, keys and ledger. Make a user (useradd --system "
            f"fedplat-node) and set supernode_user in {kit.folder / kit.FILE}"
            + ("" if same_user else "; --same-user accepts this, on a machine that is for trying out"),
        )
        return
    who = Credentials.of(kit.supernode_user)
    problems = [*_exposed(who, (kit.identity, kit.key, *guarded), kit.supernode_user)]
    problems += _replaceable(who, (kit.folder, kit.site_file, *guarded), kit.supernode_user)
    yield from problems
    if not problems:
        yield Finding("ok", "isolation", f"'{kit.supernode_user}' can't read data, keys and ledger")


def _exposed(who: Credentials, paths: Sequence[Path], user: str) -> Iterator[Finding]:
    for path in paths:
        if not path.exists():
            yield Finding("warning", "isolation", f"{path} is not there yet: run the doctor again when it is")
        elif can_read(path, who):
            yield Finding("fail", "isolation", f"the SuperNode's user '{user}' can read {path}. chmod go-rwx {path}")
        elif has_access_list(path):
            yield Finding("warning", "isolation", f"{path} has an access list, which is not looked at: getfacl {path}")


def _replaceable(who: Credentials, paths: Sequence[Path], user: str) -> Iterator[Finding]:
    for path in paths:
        if path.exists() and can_replace(path, who):
            yield Finding(
                "fail", "isolation", f"the SuperNode's user '{user}' can replace {path}, or a directory above it"
            )


def reachability(kit: Kit) -> Iterator[Finding]:
    """The server answers over TLS under its name, lets this certificate in, and its clock agrees."""
    if isinstance(kit, SiteKit | OperatorKit):
        host, port, context = kit.server_host, kit.server_port, client_context(kit.ca, kit.certificate, kit.key)
        path = allowed_paths()[kit.TABLE][0]
    elif isinstance(kit, ServerKit):
        host, port, context, path = kit.host, kit.port, client_context(kit.ca), "/"
    else:
        return
    try:
        answer = ask_front(host, port, path, context)
    except ssl.SSLError as error:
        reason = error.reason or error
        yield Finding("fail", "server", f"{host}:{port}: TLS failed ({reason}). Are kit and server of one consortium?")
        return
    except OSError as error:
        level: Level = "warning" if isinstance(kit, ServerKit) else "fail"
        yield Finding(level, "server", f"{host}:{port} can't be reached ({error}). Is it started, and the port open?")
        return
    yield admission(f"{host}:{port}", answer.status, has_certificate=not isinstance(kit, ServerKit))
    yield clock(answer.clock_ahead_s)


def admission(where: str, status: int, has_certificate: bool) -> Finding:
    """The front answers 405 to who may ask for the path, but not so; 403 to who may not; 400 to a bad certificate."""
    if not has_certificate or status == 405:
        return Finding(
            "ok", "server", f"{where} answers over TLS" + (" and lets this party in" if has_certificate else "")
        )
    if status == 403:
        return Finding("fail", "server", f"{where} does not list this certificate: revoked, or its access list is old")
    if status == 400:
        return Finding("fail", "server", f"{where} refuses this certificate. Is it expired, or of another consortium?")
    return Finding("fail", "server", f"{where} answers {status}, as no fedplat server does. Is it the right address?")


def clock(ahead_s: float | None) -> Finding:
    if ahead_s is None:
        return Finding("warning", "clock", "the server did not tell its time")
    off = abs(ahead_s)
    level: Level = "fail" if off > CLOCK_FAIL_S else "warning" if off > CLOCK_WARNING_S else "ok"
    side = "ahead of" if ahead_s > 0 else "behind"
    advice = "" if level == "ok" else ". Turn on time synchronisation: timedatectl set-ntp true"
    return Finding(level, "clock", f"{off:.0f} s {side} the server's{advice}" if off else "agrees with the server's")
