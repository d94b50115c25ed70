"""A real nginx front before a stand-in for the SuperLink that writes down what reaches it."""

import contextlib
import http.server
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from fedplat.consortium.front import front_command, write_front
from fedplat.consortium.kit_files import ServerKit

NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Upstream:
    """What stands where the SuperLink would."""

    port: int
    paths: list[str] = field(default_factory=list)


@contextlib.contextmanager
def upstream(kit: ServerKit) -> Iterator[Upstream]:
    """A TLS server with the server's own certificate, on the SuperLink's port."""
    seen = Upstream(kit.superlink_port)

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            seen.paths.append(self.path)
            self.send_response(200)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"ok")

        do_GET = do_PUT = do_DELETE = do_POST

        def log_message(self, *details: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", kit.superlink_port), Handler)
    server.daemon_threads = True
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(kit.certificate, kit.key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield seen
    finally:
        server.shutdown()
        server.server_close()


@contextlib.contextmanager
def front(kit: ServerKit) -> Iterator[subprocess.Popen[bytes]]:
    write_front(kit)
    process = subprocess.Popen([str(NGINX), *front_command(kit)[1:]], stderr=subprocess.PIPE)
    try:
        wait_for_port(kit.port, process)
        yield process
    finally:
        process.terminate()
        process.wait(timeout=10)


def wait_for_port(port: int, process: subprocess.Popen[bytes], deadline_s: float = 10) -> None:
    deadline = time.monotonic() + deadline_s
    while time.monotonic() < deadline and process.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise TimeoutError(f"the front did not start: {process.poll()}")


def ask(port: int, ca: Path, path: str, client: tuple[Path, Path] | None, method: str = "POST") -> int:
    """The status of one raw request, whose path is sent as it is; 0 if TLS did not let it through."""
    context = ssl.create_default_context(cafile=ca)
    if client:
        context.load_cert_chain(*client)
    request = f"{method} {path} HTTP/1.1\r\nHost: here\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    try:
        with (
            socket.create_connection(("127.0.0.1", port), timeout=10) as plain,
            context.wrap_socket(plain, server_hostname="127.0.0.1") as secure,
        ):
            secure.sendall(request.encode())
            answer = secure.recv(65536)
    except (ssl.SSLError, ConnectionError):
        return 0
    return int(answer.split()[1]) if answer else 0
