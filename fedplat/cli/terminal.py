"""What a long command shares with its terminal: the console, the wait for imports, the signals that stop it."""

import contextlib
import signal
import unicodedata
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

INTERRUPTED = 130


def console_for(quiet: bool, json_output: bool) -> "Console":
    from rich.console import Console

    # With --json, stdout belongs to the machine and people read stderr.
    return Console(stderr=json_output, quiet=quiet)


def plain(text: object) -> str:
    """What somebody else has written, as it may be printed through rich: one harmless line, no markup of ours."""
    from rich.markup import escape

    return escape(one_line(text))


def one_line(text: object) -> str:
    """What somebody else has written, on one line and without control characters.

    A terminal obeys escape sequences, and marks of writing direction show a text as another one.
    """
    shown = "".join(" " if c in "\n\r\t\v\f\x85\u2028\u2029" else c for c in str(text))
    return "".join(c for c in shown if not unicodedata.category(c).startswith("C"))


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
