"""The authorization table of the server's front: every role × every path, through a real nginx."""

import datetime
import json
import os
import signal
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from fedplat.consortium.authority import Authority, pem, serial_text
from fedplat.consortium.front import CONTROL, FLEET, front_command, render_front, write_front
from fedplat.consortium.issued import AccessEntry, AccessList
from fedplat.consortium.keygen import private_pem
from fedplat.consortium.kit_files import ServerKit
from fedplat.errors import UsageError
from tests.consortium.conftest import Consortium
from tests.consortium.front_server import NGINX, Upstream, ask, free_port, front, upstream

needs_nginx = pytest.mark.skipif(NGINX is None, reason="nginx is not installed: apt-get install nginx-light")

SITE_PATHS = [f"/v1/fleet/{name}" for name in FLEET]
OPERATOR_PATHS = [f"/v1/control/{name}" for name in CONTROL]
NOBODYS = [
    "/", "/health", "/v1/health", "/v1/runtime", "/v1/runtime/acquire-task", "/v1/runtime/pull-task-input",
    "/v1/fleet/", "/v1/fleet/register-node", "/v1/fleet/unregister-node", "/v1/control/", "/v1/control/register-node",
    "/v1/control/unregister-node", "/v1/control/pull-artifacts", "/v1/control/start-automation", "/docs",
    "/openapi.json", "/V1/fleet/get-run", "/v1/fleet/get-run/", "/v1/fleet/get-run/x", "/v1/fleet/GET-RUN",
]  # fmt: skip
TRICKS = [
    "//v1/runtime/acquire-task", "/v1//runtime/acquire-task", "/v1/fleet/../runtime/acquire-task",
    "/v1/fleet/%2e%2e/runtime/acquire-task", "/v1/fleet/get-run/%2e%2e/%2e%2e/runtime/acquire-task",
    "/v1/fleet/get-run%2f..%2f..%2fruntime%2facquire-task", "/v1/fleet/..%2fruntime/acquire-task",
    "/v1/fleet/%252e%252e/runtime/acquire-task", "/v1/fleet/get-run;/../../runtime/acquire-task",
    "/v1/fleet/./../runtime/acquire-task", "/v1/fleet\\..\\runtime\\acquire-task", "/%76%31/runtime/acquire-task",
    "/v1/control/../runtime/acquire-task", "/v1/fleet/register%2dnode", "/v1/fleet/get-run%00/../register-node",
    "/v1/fleet/get-run/../register-node", "/v1/control/list-runs/..%2fregister-node", "/../v1/runtime/acquire-task",
    "/v1/runtime/acquire-task?x=/v1/fleet/get-run", "/v1/runtime/acquire-task#/v1/fleet/get-run",
    "https://127.0.0.1/v1/runtime/acquire-task", "https://127.0.0.1/v1/control/register-node",
]  # fmt: skip
STRANGERS = ["revoked", "rotated", "unlisted", "expired", "other consortium", "server's own", "none"]


@dataclass
class World:
    kit: ServerKit
    consortium: Consortium
    clients: dict[str, tuple[Path, Path] | None]
    process: subprocess.Popen[bytes]
    upstream: Upstream

    def ask(self, who: str, path: str, method: str = "POST") -> tuple[int, list[str]]:
        """The status, and what reached the SuperLink because of this request."""
        self.upstream.paths.clear()
        status = ask(self.kit.port, self.kit.ca, path, self.clients[who], method)
        return status, list(self.upstream.paths)


def _kit_pair(kit: Path) -> tuple[Path, Path]:
    return kit / "tls.crt", kit / "tls.key"


def _make(folder: Path, authority: Authority, days: int, age_days: int) -> tuple[tuple[Path, Path], str]:
    """A certificate of the consortium's own CA that is not in any kit."""
    folder.mkdir()
    key = ec.generate_private_key(ec.SECP256R1())
    made = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=age_days)
    certificate = authority.issue_client(key.public_key(), "north", "site", days, made)
    (folder / "tls.crt").write_bytes(pem(certificate))
    (folder / "tls.key").write_bytes(private_pem(key))
    return _kit_pair(folder), serial_text(certificate)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("front with a space")
    alpha = Consortium(folder / "alpha", port=free_port(), sites=("north", "south", "west"))
    alpha.provision()
    old = folder / "old"
    alpha.kit("west").rename(old)  # the kit that was handed over; west is rotated below
    alpha.provision(rotate=["west"], revoke=["south"])
    beta = Consortium(folder / "beta", name="beta")
    beta.provision()
    server = alpha.kits / "server"
    text = (server / "server.toml").read_text().replace("0.0.0.0", "127.0.0.1").replace("9444", str(free_port()))
    (server / "server.toml").write_text(text)
    kit = ServerKit.load(server)
    authority = Authority.load(alpha.kits / "authority", "alpha")
    unlisted, _ = _make(folder / "unlisted", authority, 10, 0)
    expired, serial = _make(folder / "expired", authority, 10, 11)
    access = kit.load_access().serials | {serial: AccessEntry(name="north", role="site")}
    kit.access.write_text(AccessList(serials=access).model_dump_json())  # listed: only its date speaks against it
    clients: dict[str, tuple[Path, Path] | None] = {
        "site": _kit_pair(alpha.kit("north")),
        "site after rotation": _kit_pair(alpha.kit("west")),
        "operator": _kit_pair(alpha.kit("olga")),
        "revoked": _kit_pair(alpha.kit("south")),
        "rotated": _kit_pair(old),
        "unlisted": unlisted,
        "expired": expired,
        "other consortium": _kit_pair(beta.kit("north")),
        "server's own": (kit.certificate, kit.key),
        "none": None,
    }
    with upstream(kit) as seen, front(kit) as process:
        yield World(kit, alpha, clients, process, seen)


@needs_nginx
@pytest.mark.parametrize("who", ["site", "site after rotation", "operator"])
def test_each_role_reaches_what_it_needs_and_nothing_else(world: World, who: str) -> None:
    own, others = (OPERATOR_PATHS, SITE_PATHS) if who == "operator" else (SITE_PATHS, OPERATOR_PATHS)
    for path in own:
        assert world.ask(who, path) == (200, [path])
    for path in (*others, *NOBODYS):
        assert world.ask(who, path) == (403, []), path


@needs_nginx
@pytest.mark.parametrize("who", STRANGERS)
def test_a_stranger_reaches_nothing(world: World, who: str) -> None:
    for path in (*SITE_PATHS, *OPERATOR_PATHS, *NOBODYS):
        status, reached = world.ask(who, path)
        assert status in (0, 400, 403) and not reached, path


@needs_nginx
@pytest.mark.parametrize("who", ["site", "operator", *STRANGERS])
@pytest.mark.parametrize("path", TRICKS)
def test_no_spelling_of_a_path_gets_past_the_table(world: World, who: str, path: str) -> None:
    status, reached = world.ask(who, path)
    assert status in (0, 400, 403) and not reached


@needs_nginx
def test_what_is_asked_upstream_is_what_was_checked(world: World) -> None:
    for spelling in (
        "/v1/runtime/../fleet/get-run",
        "//v1///fleet/get-run",
        "/v1/fleet/%67et-run",
        "/x/../v1/fleet/get-run",
    ):
        assert world.ask("site", spelling) == (200, ["/v1/fleet/get-run"])


@needs_nginx
@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "OPTIONS", "TRACE", "CONNECT"])
def test_only_post_is_let_through(world: World, method: str) -> None:
    status, reached = world.ask("site", "/v1/fleet/get-run", method)
    assert status >= 400 and not reached


@needs_nginx
def test_a_revocation_counts_after_a_reload(world: World) -> None:
    before = world.kit.access.read_bytes()
    serials = {s: e for s, e in world.kit.load_access().serials.items() if e.role != "operator"}
    try:
        world.kit.access.write_text(AccessList(serials=serials).model_dump_json())
        _reload(world)
        _wait_until(lambda: world.ask("operator", OPERATOR_PATHS[0]) == (403, []))
        assert world.ask("site", SITE_PATHS[0]) == (200, [SITE_PATHS[0]])
    finally:
        world.kit.access.write_bytes(before)
        _reload(world)
        _wait_until(lambda: world.ask("operator", OPERATOR_PATHS[0])[0] == 200)


def _reload(world: World) -> None:
    write_front(world.kit)
    os.kill(world.process.pid, signal.SIGHUP)


def _wait_until(condition, deadline_s: float = 10) -> None:  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@needs_nginx
def test_a_body_larger_than_any_flower_object_is_refused(world: World) -> None:
    context = ssl.create_default_context(cafile=world.kit.ca)
    context.load_cert_chain(*world.clients["site"])  # type: ignore[misc]
    head = b"POST /v1/fleet/push-object HTTP/1.1\r\nHost: here\r\nContent-Length: 17000000\r\n\r\n"
    with (
        socket.create_connection(("127.0.0.1", world.kit.port), timeout=10) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1") as secure,
    ):
        secure.sendall(head)
        assert b" 413 " in secure.recv(65536).split(b"\r\n")[0]


@needs_nginx
def test_tls_before_1_2_is_refused(world: World) -> None:
    context = ssl.create_default_context(cafile=world.kit.ca)
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
    context.set_ciphers("DEFAULT@SECLEVEL=0")
    with socket.create_connection(("127.0.0.1", world.kit.port), timeout=10) as plain, pytest.raises(OSError):
        context.wrap_socket(plain, server_hostname="127.0.0.1")


@needs_nginx
def test_nginx_takes_the_configuration_without_touching_the_system(consortium: Consortium) -> None:
    kit = ServerKit.load(consortium.kits / "server")
    write_front(kit)
    done = subprocess.run([str(NGINX), *front_command(kit, "-t")[1:]], capture_output=True, text=True)
    assert done.returncode == 0 and "warn" not in done.stderr, done.stderr
    for words in map(str.split, render_front(kit, kit.load_access()).splitlines()):
        if words and words[0].endswith(("_path", "_log", "pid")):
            assert words[1].startswith(f'"{kit.data_folder}/')


@pytest.mark.parametrize("name", ['a"b', "a;b", "a$b", "a{b", "a\nb", "a\\b"])
def test_a_path_that_nginx_would_misread_is_refused(consortium: Consortium, name: str) -> None:
    kit = ServerKit.load(consortium.kits / "server").model_copy(update={"folder": consortium.folder / name})
    with pytest.raises(UsageError, match="nginx can't use this path"):
        render_front(kit, AccessList(serials={}))


@pytest.mark.parametrize("serial", ['AB" "site"; } #', "ab", "A", "", "AB\n"])
def test_an_access_list_can_hold_nothing_but_serials(tmp_path: Path, serial: str) -> None:
    path = tmp_path / "access.json"
    path.write_text(f'{{"serials": {{{json.dumps(serial)}: {{"name": "x", "role": "site"}}}}}}')
    with pytest.raises(UsageError):
        AccessList.load(path)


@needs_nginx
@pytest.mark.slow
def test_who_sends_a_request_byte_by_byte_is_cut_off(world: World) -> None:
    context = ssl.create_default_context(cafile=world.kit.ca)
    context.load_cert_chain(*world.clients["site"])  # type: ignore[misc]
    start = time.monotonic()
    with (
        socket.create_connection(("127.0.0.1", world.kit.port), timeout=30) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1") as secure,
        pytest.raises(OSError),
    ):
        while time.monotonic() < start + 25:
            secure.sendall(b"P" if time.monotonic() < start + 1 else b"O")
            time.sleep(0.5)
    assert time.monotonic() < start + 15
