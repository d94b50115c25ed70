"""`fedplat site start` and `fedplat site audit`, and the processes that `start` runs."""

import json
import time
from pathlib import Path
from typing import Annotated

import typer

from fedplat.cli.options import Json, Verbose
from fedplat.cli.terminal import terminate_like_interrupt

Kit = Annotated[Path, typer.Argument(metavar="[KIT]", help="The site's kit, from `fedplat provision`.")]


def start(kit: Kit = Path(), verbose: Verbose = False) -> None:
    """Start link, SuperNode and agent of a site, and keep them running until Ctrl-C.

    The agent answers with the code that is installed here; nothing that anybody uploads is unpacked. What it decided
    is in state/audit.jsonl (`fedplat site audit`), logs of each process in state/logs/, or in
    /var/log/fedplat/ where root starts it for another user.

    Examples:

    - `fedplat site start kits/sites/site-1`
    """
    from client_app.site_processes import site_processes
    from fedplat.accounts import acting_as, owner_of
    from fedplat.cli.processes import lock_start, set_up_service_logging, supervise
    from fedplat.consortium.kit_files import SiteKit
    from fedplat.supervisor import Supervisor
    from privacy.site_budgets import load_site

    set_up_service_logging(verbose)
    with acting_as(owner_of(kit)):
        loaded = SiteKit.load(kit)
        load_site(loaded.site_file)
        loaded.load_roster()
        lock_start(loaded.state_folder)
    processes = site_processes(loaded)
    try:
        supervisor = Supervisor(processes.programs, processes.pids)
        typer.echo(f"site {loaded.name} of {loaded.consortium}; logs in {processes.logs}")
        supervise(supervisor)
    finally:
        processes.close()


def audit(kit: Kit = Path(), json_output: Json = False) -> None:
    """Show every decision of a site's agent, and check that the log was not changed.

    Examples:

    - `fedplat site audit kits/sites/site-1`
    """
    from client_app.audit_log import read_audit
    from fedplat.consortium.kit_files import SiteKit

    entries = read_audit(SiteKit.load(kit).state_folder / "audit.jsonl")
    if json_output:
        typer.echo(json.dumps(entries))
        return
    for entry in entries:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry["time"]))
        about = " ".join(f"{key}={entry[key]}" for key in ("kind", "round", "attempt") if key in entry)
        typer.echo(f"{when}  {entry['decision']:<9} {about}  {entry['reason']}".rstrip())
    typer.echo(f"{len(entries)} decisions, the chain holds", err=True)


def agent(kit: Kit) -> None:
    """The process that trains; `start` runs it."""
    from client_app.agent import Agent
    from fedplat.cli.processes import set_up_service_logging
    from fedplat.consortium.kit_files import SiteKit

    set_up_service_logging(True)
    with terminate_like_interrupt():
        try:
            Agent(SiteKit.load(kit)).run()
        except KeyboardInterrupt:
            raise typer.Exit(0) from None


def link(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER")],
    server: Annotated[str, typer.Option("--server")],
    port: Annotated[int, typer.Option("--port")],
) -> None:
    """The process that carries the SuperNode's requests; `start` runs it."""
    import uvicorn

    from client_app.link import Link
    from fedplat.flower.control import Credentials

    context = Credentials(folder / "tls.crt", folder / "tls.key", folder / "ca.crt").context()
    uvicorn.run(
        Link(server, context, folder / "node.id").app(),
        host="127.0.0.1",
        port=port,
        ssl_certfile=str(folder / "local.crt"),
        ssl_keyfile=str(folder / "local.key"),
        log_level="warning",
        timeout_keep_alive=60,
    )
