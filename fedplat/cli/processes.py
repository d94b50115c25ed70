"""What `fedplat site start` and `fedplat server start` share."""

import logging
from collections.abc import Callable

import typer

from fedplat.cli.terminal import terminate_like_interrupt
from fedplat.supervisor import Supervisor


def set_up_service_logging(verbose: bool) -> None:
    """Lines with a time, for a log file; Flower and HTTP only where something is wrong."""
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    for noisy in ("httpx", "httpcore", "flwr", "matplotlib"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def supervise(supervisor: Supervisor, while_true: Callable[[], bool] = lambda: True) -> None:
    with terminate_like_interrupt():
        try:
            supervisor.run(while_true)
        except KeyboardInterrupt:
            typer.echo("stopped", err=True)
