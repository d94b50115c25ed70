"""A real Flower federation on loopback: SuperLink over TLS with node authentication, SuperNodes, `flwr`."""

import datetime
import ipaddress
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

BIN = Path(sys.executable).parent
REPOSITORY = Path(__file__).parents[2]
PARTS = ("pyproject.toml", "README.md", "LICENSE", "fedplat", "server_app", "client_app", "privacy", "simulations")
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}


def copy_app(folder: Path) -> Path:
    """What `flwr run` uploads: what a Flower user would have, without tests, virtual environment and runs."""
    app = folder / "app"
    app.mkdir()
    for part in PARTS:
        source = REPOSITORY / part
        if source.is_dir():
            shutil.copytree(source, app / part, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, app / part)
    return app


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def write_certificates(folder: Path) -> None:
    """ca.crt, server.pem and server.key for 127.0.0.1."""
    now = datetime.datetime.now(datetime.UTC)
    ca_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    ca_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fedplat test CA")])
    base = x509.CertificateBuilder().issuer_name(ca_name).not_valid_before(now - datetime.timedelta(minutes=5))
    base = base.not_valid_after(now + datetime.timedelta(days=1))
    ca = (
        base.subject_name(ca_name).public_key(ca_key.public_key()).serial_number(x509.random_serial_number())
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(ca_key, hashes.SHA256())
    )  # fmt: skip
    names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1")), x509.DNSName("localhost")])
    certificate = (
        base.subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")]))
        .public_key(key.public_key()).serial_number(x509.random_serial_number())
        .add_extension(names, critical=False).sign(ca_key, hashes.SHA256())
    )  # fmt: skip
    (folder / "ca.crt").write_bytes(ca.public_bytes(serialization.Encoding.PEM))
    (folder / "server.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    (folder / "server.key").write_bytes(_pem(key))


def write_node_key(path: Path) -> None:
    key = ec.generate_private_key(ec.SECP384R1())
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    path.write_bytes(private)
    path.chmod(0o600)
    path.with_suffix(".pub").write_bytes(public)


class FlowerFederation:
    """Start it, run an app on it, and end every process that it started."""

    def __init__(
        self,
        folder: Path,
        nodes: int,
        node_environments: tuple[dict[str, str], ...] = (),
        *,
        superlink_options: tuple[str, ...] = (),
        own: dict[str, str] | None = None,
    ) -> None:
        """`own`: what every process finds in its environment beside the usual."""
        self._folder, self._nodes, self._node_environments = folder, nodes, node_environments
        self._superlink_options = superlink_options
        self._port = free_port()
        self._processes: list[subprocess.Popen[bytes]] = []
        home = folder / "home"
        home.mkdir()
        self.environment = {
            **os.environ,
            **(own or {}),
            **QUIET,
            "FLWR_HOME": str(home),
            "FEDPLAT_RUNS": str(folder / "runs"),
        }
        self.environment["PATH"] = f"{BIN}:{os.environ['PATH']}"
        (home / "config.toml").write_text(
            f'[superlink]\ndefault = "here"\n[superlink.here]\naddress = "127.0.0.1:{self._port}"\n'
            f'root-certificates = "{folder / "ca.crt"}"\n'
        )
        write_certificates(folder)

    def __enter__(self) -> "FlowerFederation":
        self._start("superlink", "flower-superlink", "--ssl-ca-certfile", "ca.crt", "--ssl-certfile", "server.pem",
                    "--ssl-keyfile", "server.key", "--enable-supernode-auth", "--host", "127.0.0.1",
                    "--port", str(self._port), *self._superlink_options)  # fmt: skip
        self._wait_for_port()
        for number in range(self._nodes):
            write_node_key(self._folder / f"node{number}")
            self.flwr("supernode", "register", f"node{number}.pub", "here")
            self._start(f"node{number}", "flower-supernode", "--root-certificates", "ca.crt",
                        "--superlink", f"127.0.0.1:{self._port}", "--auth-supernode-private-key", f"node{number}",
                        "--port", str(free_port()), "--node-config", f"partition-id={number}",
                        own=self._node_environments[number] if self._node_environments else {})  # fmt: skip
        return self

    def __exit__(self, *details: object) -> None:
        for process in reversed(self._processes):
            process.terminate()
        for process in self._processes:
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()

    def flwr(self, *arguments: str, timeout_s: float = 180) -> str:
        done = subprocess.run(
            ["flwr", *arguments],
            cwd=self._folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def _start(self, name: str, *command: str, own: dict[str, str] | None = None) -> None:
        with (self._folder / f"{name}.log").open("wb") as log:
            self._processes.append(
                subprocess.Popen(
                    command, cwd=self._folder, env={**self.environment, **(own or {})}, stdout=log, stderr=log
                )
            )

    def _wait_for_port(self, deadline_s: float = 30) -> None:
        deadline = time.monotonic() + deadline_s
        while time.monotonic() < deadline:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self._port)) == 0:
                    return
            time.sleep(0.1)
        raise TimeoutError((self._folder / "superlink.log").read_text())
