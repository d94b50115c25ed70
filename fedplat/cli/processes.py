"""What `fedplat site start` and `fedplat server start` share."""

import logging
from collections.abc import Callable
from pathlib import Path

import typer

from fedplat.cli.terminal import terminate_like_interrupt
from fedplat.locks import hold
from fedplat.supervisor import Supervisor

_held: list[int] = []


def set_up_service_logging(verbose: bool) -> None:
    """Lines with a time, for a log file; Flower and HTTP only where something is wrong."""
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    for noisy in ("httpx", "httpcore", "flwr", "matplotlib"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def lock_start(state: Path) -> None:
    """One supervisor per kit, held until this process ends: a second one would write over the first one's files."""
    state.mkdir(mode=0o700, parents=True, exist_ok=True)
    _held.append(hold(state / "start.lock", "this kit is started already, by another process. Stop that one first"))


def supervise(supervisor: Supervisor, while_true: Callable[[], bool] = lambda: True) -> None:
    with terminate_like_interrupt():
        try:
            supervisor.run(while_true)
        except KeyboardInterrupt:
            typer.echo("stopped", err=True)
