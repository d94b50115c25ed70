"""The site's link: real TLS on both sides, an upstream that demands the site's certificate."""

import asyncio
import contextlib
import gzip
import http.server
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from cryptography.hazmat.primitives.asymmetric import ec
from starlette.requests import Request

from client_app import link as links
from client_app.link import LARGEST_ANSWER, LARGEST_BODY, Link
from fedplat.consortium.authority import Authority, pem
from fedplat.consortium.identity import write_secret
from fedplat.consortium.keygen import private_pem
from fedplat.consortium.local_tls import LocalTls
from fedplat.flower.control import Credentials
from fedplat.flower.fleet import PULL_MESSAGES as POLL_PATH

DEADLINE_S = 30.0
OTHER_PATH = "/v1/fleet/push-message"


@dataclass
class Seen:
    path: str
    headers: dict[str, str]
    body: bytes
    subject: str


@dataclass
class Server:
    """What stands where the front would; `answer` decides."""

    port: int
    seen: list[Seen] = field(default_factory=list)
    answer: Callable[[Seen], tuple[int, dict[str, str], bytes]] = lambda seen: (200, {}, b"ok")


@contextlib.contextmanager
def front(authority: Authority, folder: Path) -> Iterator[Server]:
    """A TLS server that lets nobody in without a certificate of the consortium."""
    key = ec.generate_private_key(ec.SECP256R1())
    write_secret(folder / "server.key", private_pem(key))
    (folder / "server.crt").write_bytes(pem(authority.issue_server(key.public_key(), ["127.0.0.1"], 1)))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.crt", folder / "server.key")
    context.load_verify_locations(folder / "authority" / "ca.crt")
    context.verify_mode = ssl.CERT_REQUIRED

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            certificate: Any = self.connection.getpeercert()  # type: ignore[attr-defined]
            subject = dict(pair for part in certificate["subject"] for pair in part)["commonName"]
            request = Seen(self.path, {k.lower(): v for k, v in self.headers.items()}, body, subject)
            server.seen.append(request)
            status, headers, content = server.answer(request)
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_PUT = do_DELETE = do_POST

        def log_message(self, *details: object) -> None:
            pass

    listener = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    listener.daemon_threads = True
    listener.socket = context.wrap_socket(listener.socket, server_side=True)
    server = Server(listener.server_address[1])
    threading.Thread(target=listener.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        listener.shutdown()
        listener.server_close()


@contextlib.contextmanager
def linked(server: str, context: ssl.SSLContext, local: LocalTls) -> Iterator[httpx.Client]:
    """A running link, and a client that trusts this machine's own certificate as a SuperNode does."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    config = uvicorn.Config(
        Link(server, context, local.key.with_name("node.id")).app(),
        ssl_certfile=str(local.certificate),
        ssl_keyfile=str(local.key),
        log_level="critical",
    )
    running = uvicorn.Server(config)
    thread = threading.Thread(target=running.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    deadline = time.monotonic() + DEADLINE_S
    while not running.started:
        assert thread.is_alive() and time.monotonic() < deadline
        time.sleep(0.01)
    port = listener.getsockname()[1]
    trusting = ssl.create_default_context(cafile=str(local.certificate))
    try:
        with httpx.Client(base_url=f"https://127.0.0.1:{port}", verify=trusting, timeout=DEADLINE_S) as client:
            yield client
    finally:
        running.should_exit = running.force_exit = True
        thread.join(DEADLINE_S)
        listener.close()


@dataclass
class World:
    server: Server
    client: httpx.Client


@pytest.fixture(scope="module")
def party(tmp_path_factory: pytest.TempPathFactory) -> tuple[Authority, Path]:
    folder = tmp_path_factory.mktemp("link")
    authority = Authority.create(folder / "authority", "alpha")
    key = ec.generate_private_key(ec.SECP256R1())
    write_secret(folder / "tls.key", private_pem(key))
    (folder / "tls.crt").write_bytes(pem(authority.issue_client(key.public_key(), "north", "site", 1)))
    return authority, folder


@pytest.fixture(scope="module")
def running(party: tuple[Authority, Path]) -> Iterator[World]:
    authority, folder = party
    credentials = Credentials(folder / "tls.crt", folder / "tls.key", folder / "authority" / "ca.crt")
    with (
        front(authority, folder) as server,
        linked(f"127.0.0.1:{server.port}", credentials.context(), LocalTls.create(folder)) as client,
    ):
        yield World(server, client)


@pytest.fixture
def world(running: World) -> World:
    running.server.seen.clear()
    running.server.answer = lambda seen: (200, {}, b"ok")
    return running


def test_body_and_headers_go_there_and_come_back_under_the_sites_certificate(world):
    world.server.answer = lambda seen: (200, {"X-Answer": "yes", "Content-Type": "application/protobuf"}, b"\0\xffback")
    body = bytes(range(256)) * 5
    answer = world.client.post(OTHER_PATH, content=body, headers={"X-Flower": "é".encode(), "Content-Type": "a/b"})
    (seen,) = world.server.seen
    assert (seen.path, seen.body, seen.subject) == (OTHER_PATH, body, "north")
    assert seen.headers["x-flower"] and seen.headers["content-type"] == "a/b"
    assert seen.headers["host"] == f"127.0.0.1:{world.server.port}"
    assert answer.status_code == 200 and answer.content == b"\0\xffback"
    assert answer.headers["x-answer"] == "yes" and answer.headers["content-type"] == "application/protobuf"
    assert answer.headers.get_list("content-length") == ["6"] and len(answer.headers.get_list("date")) <= 1


@pytest.mark.parametrize("status", [200, 400, 401, 403, 404, 409, 500, 502])
def test_what_the_server_says_is_passed_on(status, world):
    world.server.answer = lambda seen: (status, {}, b"reason")
    for path in (OTHER_PATH, POLL_PATH):
        answer = world.client.post(path)
        assert (answer.status_code, answer.content) == (status, b"reason")


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "x-unknown", "identity, gzip"])
@pytest.mark.parametrize("path", [OTHER_PATH, POLL_PATH])
def test_a_compressed_answer_is_refused_unopened(encoding, path, world):
    """A bomb of a few kilobytes would fill the site's memory."""
    bomb = gzip.compress(bytes(64 << 20))
    world.server.answer = lambda seen: (200, {"Content-Encoding": encoding}, bomb)
    answer = world.client.post(path, headers={"Accept-Encoding": "gzip, br"})
    assert answer.status_code == 502 and len(answer.content) < 200
    assert [seen.headers["accept-encoding"] for seen in world.server.seen] == ["identity"]


def test_an_answer_over_the_limit_is_cut_off_while_it_arrives(world):
    world.server.answer = lambda seen: (200, {}, bytes(LARGEST_ANSWER))
    assert len(world.client.post(OTHER_PATH).content) == LARGEST_ANSWER
    world.server.answer = lambda seen: (200, {}, bytes(LARGEST_ANSWER + 1))
    for path in (OTHER_PATH, POLL_PATH):
        assert world.client.post(path).status_code == 502


def test_a_body_without_a_length_is_counted_while_it_arrives():
    """The sender of an endless body is stopped, not waited for."""
    sent = 0

    async def receive() -> dict[str, Any]:
        nonlocal sent
        sent += 1 << 20
        assert sent < 2 * LARGEST_BODY, "the link reads on after its limit"
        return {"type": "http.request", "body": bytes(1 << 20), "more_body": True}

    scope = {"type": "http", "method": "POST", "path": OTHER_PATH, "headers": [(b"transfer-encoding", b"chunked")]}
    assert asyncio.run(links._body(Request(scope, receive))) is None


def test_the_environment_does_not_redirect_the_link(world, monkeypatch, party, tmp_path):
    for name in ("HTTPS_PROXY", "ALL_PROXY", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "")
    folder = party[1]
    credentials = Credentials(folder / "tls.crt", folder / "tls.key", folder / "authority" / "ca.crt")
    made = Link(f"127.0.0.1:{world.server.port}", credentials.context(), tmp_path / "node.id")
    assert made._client._mounts == {}


def test_an_empty_poll_is_held_and_answered_as_soon_as_something_is_there(world):
    ready = threading.Event()
    world.server.answer = lambda seen: (200, {}, b"a message" if ready.is_set() else b"")
    answers: list[httpx.Response] = []
    asking = threading.Thread(target=lambda: answers.append(world.client.post(POLL_PATH, content=b"any?")))
    asking.start()
    deadline = time.monotonic() + DEADLINE_S
    while len(world.server.seen) < 4:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert not answers  # asked four times, and still held
    ready.set()
    asking.join(links.HOLD_S / 2)  # well before an empty answer would be let go
    assert [answer.content for answer in answers] == [b"a message"]
    assert {seen.body for seen in world.server.seen} == {b"any?"}


def test_an_empty_poll_is_not_held_for_ever(world, monkeypatch):
    monkeypatch.setattr(links, "HOLD_S", 0.3)
    world.server.answer = lambda seen: (200, {}, b"")
    answer = world.client.post(POLL_PATH)
    assert (answer.status_code, answer.content) == (200, b"") and len(world.server.seen) >= 2


def test_only_polls_are_held(world):
    world.server.answer = lambda seen: (200, {}, b"")
    assert world.client.post(OTHER_PATH).content == b""
    assert len(world.server.seen) == 1


def test_a_held_poll_keeps_nobody_else_waiting(world):
    ready = threading.Event()
    world.server.answer = lambda seen: (200, {}, b"" if seen.path == POLL_PATH and not ready.is_set() else b"now")
    asking = threading.Thread(target=lambda: world.client.post(POLL_PATH))
    asking.start()
    assert world.client.post(OTHER_PATH).content == b"now"
    ready.set()
    asking.join(DEADLINE_S)


OTHERS = [
    "/", "/v1", "/v1/fleet", "/v1/control/start-run", "/v1/runtime/acquire-task", "/v2/fleet/x", "/docs",
    "/v1/fleet/../control/start-run", "/v1/fleet/../../v1/runtime/acquire-task",
    "/v1/fleet/%2e%2e/runtime/acquire-task",
    "/v1/fleet/..%2fruntime/acquire-task", "/v1/fleet/./../runtime/acquire-task", "/V1/FLEET/x",
]  # fmt: skip


def raw(client: httpx.Client, path: str, method: str = "POST") -> int:
    """The status of a request whose path is sent as it is."""
    url = client.base_url
    context = ssl._create_unverified_context()
    with (
        socket.create_connection(("127.0.0.1", url.port), timeout=DEADLINE_S) as plain,
        context.wrap_socket(plain) as secure,
    ):
        secure.sendall(
            f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode()
        )
        return int(secure.recv(65536).split()[1])


@pytest.mark.parametrize("path", OTHERS)
def test_nothing_but_the_fleet_api_is_carried(path, world):
    assert raw(world.client, path) == 404
    assert world.server.seen == []


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "CONNECT"])
def test_other_methods_are_refused(method, world):
    assert raw(world.client, OTHER_PATH, method) in (404, 405)
    assert world.server.seen == []


def test_a_body_over_the_limit_is_refused_and_one_at_the_limit_is_carried(world):
    assert world.client.post(OTHER_PATH, content=bytes(LARGEST_BODY + 1)).status_code == 413
    assert world.server.seen == []
    assert world.client.post(OTHER_PATH, content=bytes(LARGEST_BODY)).status_code == 200
    assert len(world.server.seen[0].body) == LARGEST_BODY


def test_a_server_that_is_down_or_not_the_consortiums_is_a_503(party, world, tmp_path):
    folder = party[1]
    local = LocalTls.create(tmp_path)
    credentials = Credentials(folder / "tls.crt", folder / "tls.key", folder / "authority" / "ca.crt")
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        with linked(f"127.0.0.1:{closed.getsockname()[1]}", credentials.context(), local) as client:
            for path in (OTHER_PATH, POLL_PATH):
                assert client.post(path).status_code == 503
    Authority.create(tmp_path / "authority", "beta")
    other = Credentials(folder / "tls.crt", folder / "tls.key", tmp_path / "authority" / "ca.crt")
    with linked(f"127.0.0.1:{world.server.port}", other.context(), local) as client:
        assert client.post(OTHER_PATH).status_code == 503
    assert world.server.seen == []


def test_without_the_sites_certificate_nothing_gets_in(party, world, tmp_path):
    """What the link is for: the same request without it."""
    context = ssl.create_default_context(cafile=str(party[1] / "authority" / "ca.crt"))
    with linked(f"127.0.0.1:{world.server.port}", context, LocalTls.create(tmp_path)) as client:
        assert client.post(OTHER_PATH).status_code == 503
    assert world.server.seen == []


def test_a_server_that_comes_back_is_reached_again(world):
    """One refused connection leaves nothing behind."""
    world.server.answer = lambda seen: (200, {"Connection": "close"}, b"ok")
    for _ in range(3):
        assert world.client.post(OTHER_PATH).status_code == 200
