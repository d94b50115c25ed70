"""How long to wait before looking again: soon for what the wait has lasted.

A look costs its other side a call. Looking again after a tenth of the time waited so far finds an answer with at most a
tenth of delay, often while answers come fast, and rarely where nothing happens.
"""

import time

PART = 0.1


class Patience:
    """The pauses of one wait. `restart` it whenever something came."""

    def __init__(self, shortest_s: float, longest_s: float) -> None:
        self._shortest_s, self._longest_s = shortest_s, longest_s
        self.restart()

    def restart(self) -> None:
        self._since = time.monotonic()

    def pause_s(self) -> float:
        waited_s = time.monotonic() - self._since
        return min(max(PART * waited_s, self._shortest_s), self._longest_s)
