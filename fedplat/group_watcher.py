"""Kills what a supervisor has started when the supervisor itself is killed.

A process of its own, run as a file with nothing but the standard library: it reads "+GROUP", "-GROUP" and "=0"
(forget all) lines from its standard input, whose other end only the supervisor holds, and when that end closes it kills
every group that is left.
"""

import contextlib
import os
import signal
import sys


def watch(lines: int) -> None:
    groups: set[int] = set()
    rest = b""
    while part := os.read(lines, 4096):
        *whole, rest = (rest + part).split(b"\n")
        for line in whole:
            if line.startswith(b"="):
                groups.clear()
            elif line.startswith(b"+"):
                groups.add(int(line[1:]))
            else:
                groups.discard(int(line[1:]))
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it ends when its supervisor does, and not before
    watch(sys.stdin.fileno())
