"""`fedplat server`: start the server of a kit."""

from pathlib import Path
from typing import Annotated

import typer

from fedplat.cli.options import Verbose
from fedplat.cli.terminal import terminate_like_interrupt

app = typer.Typer(no_args_is_help=True, help="Run the server of a consortium.", rich_markup_mode="markdown")
Kit = Annotated[Path, typer.Argument(metavar="[KIT]", help="The server's kit, from `fedplat provision`.")]


@app.command()
def start(kit: Kit = Path(), verbose: Verbose = False) -> None:
    """Start SuperLink, front and executor, and keep them running until Ctrl-C.

    Runs are kept in the kit's runs/ directory, like a simulation's. Logs of each process are in state/logs/.

    Examples:

    - `fedplat server start kits/server`
    """
    from fedplat.accounts import owner_of
    from fedplat.cli.processes import lock_start, set_up_service_logging, supervise
    from fedplat.consortium.kit_files import ServerKit
    from fedplat.errors import UsageError
    from fedplat.supervisor import Supervisor
    from server_app.server_processes import AccessWatch, server_programs

    set_up_service_logging(verbose)
    if owner := owner_of(kit):
        raise UsageError(f"{kit}: belongs to '{owner}', and a server needs no root. Start it as '{owner}'")
    loaded = ServerKit.load(kit)
    loaded.load_roster()
    lock_start(loaded.data_folder)
    supervisor = Supervisor(server_programs(loaded), loaded.data_folder / "pids")
    typer.echo(f"server of {loaded.consortium} on {loaded.host}:{loaded.port}; logs in {loaded.data_folder / 'logs'}")
    supervise(supervisor, AccessWatch(loaded, supervisor))


@app.command(hidden=True)
def executor(kit: Kit) -> None:
    """The process that drives runs; `start` runs it."""
    from fedplat.cli.processes import set_up_service_logging
    from fedplat.consortium.kit_files import ServerKit
    from server_app.executor import Executor

    set_up_service_logging(True)
    with terminate_like_interrupt():
        try:
            Executor(ServerKit.load(kit)).run()
        except KeyboardInterrupt:
            raise typer.Exit(0) from None
