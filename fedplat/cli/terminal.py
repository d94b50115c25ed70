"""What a long command shares with its terminal: the console, the wait for imports, the signals that stop it."""

import contextlib
import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

INTERRUPTED = 130


def console_for(quiet: bool, json_output: bool) -> "Console":
    from rich.console import Console

    # With --json, stdout belongs to the machine and people read stderr.
    return Console(stderr=json_output, quiet=quiet)


@contextlib.contextmanager
def loading(console: "Console") -> Iterator[None]:
    with console.status("loading PyTorch and Flower …"):
        yield


@contextlib.contextmanager
def terminate_like_interrupt() -> Iterator[None]:
    """SIGTERM stops a run as cleanly as Ctrl-C does, and Ctrl-C works even if a shell's `&` had it ignored."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    previous = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
