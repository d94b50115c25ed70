"""The text files of a kit: configuration and start scripts, as their first readers see them."""

from fedplat.consortium.spec import ServerSection, is_address

FIRST_SITE_PORT = 9500


def endpoint(server: ServerSection) -> str:
    host = f"[{server.host}]" if is_address(server.host) and ":" in server.host else server.host
    return f"{host}:{server.port}"


def site_ports(index: int) -> tuple[int, int]:
    """Link and node port: distinct for each site, so that several can live on one machine."""
    first = FIRST_SITE_PORT + 2 * (index % 16_000)
    return first, first + 1


def server_toml(server: ServerSection, consortium: str, authority: str) -> str:
    return f"""\
# The server of this consortium. Check it with `fedplat doctor .`, start it with ./start.sh.
[server]
name = "server"
consortium = "{consortium}"
authority = "{authority}"   # signs the roster
host = "{server.host}"            # under which sites and operators reach it
port = {server.port}
listen = "0.0.0.0"                # "::" to listen on IPv6 too
superlink_port = 9444             # loopback only
data = "state"                    # database, logs and the front's files, relative to this file
runs = "runs"                     # run directories
"""


def federation_toml(name: str, index: int, server: ServerSection, consortium: str, authority: str) -> str:
    link_port, node_port = site_ports(index)
    return f"""\
# How this site takes part. What it allows stands in site.toml. Check with `fedplat doctor .`, start with ./start.sh.
[site]
name = "{name}"
consortium = "{consortium}"
authority = "{authority}"   # signs the roster
server = "{endpoint(server)}"
link_port = {link_port}                  # loopback: the proxy that adds this site's certificate
node_port = {node_port}                  # loopback: the SuperNode, which this site's agent serves
# supernode_user = "fedplat-node" # another user than the agent's, who can't read data, keys and ledger
"""


def operator_toml(name: str, server: ServerSection, consortium: str, authority: str) -> str:
    return f"""\
# Who this operator is and which server jobs are submitted to. Check with `fedplat doctor .`
[operator]
name = "{name}"
consortium = "{consortium}"
authority = "{authority}"   # signs the roster
server = "{endpoint(server)}"
"""


def start_script(command: str, what: str) -> str:
    return f"""\
#!/bin/sh
# Starts {what} of this kit in the foreground.
exec fedplat {command} start "$(dirname "$0")"
"""
