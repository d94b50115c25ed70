"""The front: nginx before the SuperLink, the only door of the server.

The open-source SuperLink lets anyone who reaches its port submit runs to every node, so nobody does: it listens on
loopback, and the front demands a certificate of this consortium's CA whose serial is on the access list. A site reaches
what a SuperNode needs of the fleet API, an operator what `fedplat submit`, `status`, `logs`, `stop` and `sites` need of
the control API, and nobody the runtime API. Registering nodes is the server's own business.

The rules are lists of what is allowed, as exact locations on the path after nginx has decoded and normalised it; the
path that goes upstream is the location's own text, so that what was checked is what is asked.

A site's certificate opens the fleet API, not a particular node: that a message is for this node and from it is proven
by the node key's signature, which the SuperLink checks (`--enable-supernode-auth`). A site that holds no other site's
node key can't act as its node.
"""

import os
import pwd
import shutil
from pathlib import Path

from fedplat.consortium.issued import AccessList
from fedplat.consortium.kit_files import ServerKit
from fedplat.errors import UsageError
from fedplat.files import write_file

FLEET = (
    "activate-node",
    "deactivate-node",
    "send-node-heartbeat",
    "pull-messages",
    "push-messages",
    "get-run",
    "get-fab",
    "push-object",
    "pull-object",
    "confirm-message-received",
)
"""All of Flower 1.41's fleet API but register-node and unregister-node."""
CONTROL = ("start-run", "stop-run", "list-runs", "list-nodes", "stream-logs")
STREAMED = frozenset({"stream-logs"})
TEMPORARY = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
CONNECTIONS_PER_CERTIFICATE, CONNECTIONS_PER_ADDRESS = 64, 256


def allowed_paths() -> dict[str, tuple[str, ...]]:
    """The authorization table: what each role may ask for, and there is nothing else."""
    return {
        "site": tuple(f"/v1/fleet/{name}" for name in FLEET),
        "operator": tuple(f"/v1/control/{name}" for name in CONTROL),
    }


def render_front(kit: ServerKit, access: AccessList, user: str | None = None) -> str:
    """nginx.conf. It runs in the foreground as whoever starts it; `user` is for workers of a master that is root."""
    return f"""\
# The front of this consortium's server. Written by `fedplat server start`: edits are lost.
{_process(kit.data_folder / "front", user)}
http {{
{_files(kit.data_folder / "front")}
    server_tokens off;
    default_type application/octet-stream;

    # A certificate that is not listed here is nobody's, whoever signed it.
{_map("fedplat_role", {serial: entry.role for serial, entry in access.serials.items()})}
{_map("fedplat_party", {serial: entry.name for serial, entry in access.serials.items()})}

    upstream superlink {{
        server 127.0.0.1:{kit.superlink_port} max_fails=0;
        keepalive 32;
        keepalive_timeout 4s;  # less than the SuperLink's own, so that no request meets a connection it just closed
    }}

{_limits()}

{_server(kit)}
}}
"""


def _process(folder: Path, user: str | None) -> str:
    return f"""\
daemon off;
{f"user {user};" if user else "# Runs as the user who starts it."}
worker_processes 2;
worker_shutdown_timeout 30s;
pid {_quoted(folder / "nginx.pid")};
error_log {_quoted(folder / "error.log")} warn;

events {{
    worker_connections 4096;
}}
"""


def _files(folder: Path) -> str:
    """Everything that nginx writes is the server's own, so that it needs no root."""
    temporary = "\n".join(f"    {name}_temp_path {_quoted(folder / name)};" for name in TEMPORARY)
    return f"""\
{temporary}
    log_format parties '$time_iso8601 $remote_addr $fedplat_party $request_method $uri $status $request_length '
                       '$bytes_sent $request_time';
    map "$uri $status" $fedplat_logged {{
        default 1;
        "/v1/fleet/pull-messages 200" 0;  # every site asks several times a second
    }}
    access_log {_quoted(folder / "access.log")} parties if=$fedplat_logged;"""


def _server(kit: ServerKit) -> str:
    listen = f"[{kit.listen}]" if ":" in kit.listen else kit.listen
    locations = "\n".join(_location(role, path) for role, paths in allowed_paths().items() for path in paths)
    return f"""\
    server {{
        listen {listen}:{kit.port} ssl{" ipv6only=off" if kit.listen == "::" else ""};
        server_name _;
{_tls(kit)}
        merge_slashes on;

{_proxy(kit)}

{locations}
        location / {{
            return 403;
        }}
    }}"""


def _map(variable: str, values: dict[str, str]) -> str:
    rows = "\n".join(f'        "{serial}" "{value}";' for serial, value in values.items())
    return f'    map $ssl_client_serial ${variable} {{\n        default "";\n{rows}\n    }}'


def _limits() -> str:
    """Nobody holds a worker for long by being slow, and nobody holds many connections at once."""
    return f"""\
    limit_conn_zone $ssl_client_serial zone=certificate:1m;
    limit_conn_zone $binary_remote_addr zone=address:1m;
    limit_conn certificate {CONNECTIONS_PER_CERTIFICATE};
    limit_conn address {CONNECTIONS_PER_ADDRESS};
    limit_conn_status 429;
    client_header_timeout 10s;  # the TLS handshake too
    client_body_timeout 30s;
    send_timeout 30s;
    keepalive_timeout 75s;
    reset_timedout_connection on;
    client_header_buffer_size 2k;
    large_client_header_buffers 4 8k;
    client_max_body_size 16m;  # Flower sends arrays in objects of 5 MiB"""


def _tls(kit: ServerKit) -> str:
    return f"""\
        ssl_certificate {_quoted(kit.certificate)};
        ssl_certificate_key {_quoted(kit.key)};
        ssl_protocols TLSv1.2 TLSv1.3;
        ssl_ciphers ECDHE+AESGCM:ECDHE+CHACHA20;
        ssl_session_tickets off;
        ssl_session_cache off;
        ssl_client_certificate {_quoted(kit.ca)};
        ssl_verify_client on;
        ssl_verify_depth 1;"""


def _proxy(kit: ServerKit) -> str:
    return f"""\
        proxy_http_version 1.1;
        proxy_set_header Connection "";
        proxy_set_header Host localhost:{kit.superlink_port};
        proxy_ssl_verify on;
        proxy_ssl_verify_depth 1;
        proxy_ssl_trusted_certificate {_quoted(kit.ca)};
        proxy_ssl_name localhost;  # a name of every server certificate that `fedplat provision` issues
        proxy_ssl_server_name on;
        proxy_ssl_protocols TLSv1.2 TLSv1.3;
        proxy_connect_timeout 5s;
        proxy_send_timeout 120s;
        proxy_read_timeout 120s;
        proxy_next_upstream off;"""


def _location(role: str, path: str) -> str:
    streamed = path.rpartition("/")[2] in STREAMED
    streaming = "            proxy_buffering off;\n            proxy_read_timeout 24h;\n" if streamed else ""
    return f"""\
        location = {path} {{
            if ($fedplat_role != {role}) {{ return 403; }}
            if ($request_method != POST) {{ return 405; }}
{streaming}            proxy_pass https://superlink{path};
        }}
"""


def _quoted(path: Path) -> str:
    """A path as nginx reads it. One with characters that nginx gives a meaning to is refused, not escaped."""
    text = str(path)
    if any(c in '"\\$;{}' or ord(c) < 32 for c in text):
        raise UsageError(f"{text}: nginx can't use this path. Put the kit where no \" \\ $ ; {{ }} is in the way")
    return f'"{text}"'


def write_front(kit: ServerKit) -> Path:
    """Make the front's directory and its nginx.conf from the current access list; gives the file."""
    folder = kit.data_folder / "front"
    for directory in (kit.data_folder, folder, *(folder / name for name in TEMPORARY)):
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / "nginx.conf"
    user = pwd.getpwuid(folder.stat().st_uid).pw_name if os.geteuid() == 0 else None
    write_file(path, render_front(kit, kit.load_access(), user).encode())
    return path


def find_nginx() -> str | None:
    """nginx lies in sbin, which is not on everybody's path."""
    return shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")


def front_command(kit: ServerKit, *extra: str) -> list[str]:
    """How nginx is started with what `write_front` wrote. A SIGHUP makes it read a new access list."""
    folder = kit.data_folder / "front"
    return [
        find_nginx() or "nginx",
        "-p",
        str(folder),
        "-e",
        str(folder / "error.log"),
        "-c",
        str(folder / "nginx.conf"),
        *extra,
    ]
