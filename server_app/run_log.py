"""A run's events on their way to whoever watches: as lines of the Flower run's log, sent beside the run's own work."""

import logging
import queue
import threading
from types import TracebackType
from typing import Self

from fedplat.events import ClientTrained, Event
from fedplat.flower.tasks import Task

logger = logging.getLogger(__name__)
MOST_WAITING = 10_000


class RunLog:
    """A listener of the event log. What can't be sent is dropped: the run directory has it."""

    def __init__(self, task: Task, run_id: int) -> None:
        self._task, self._run_id = task, run_id
        self._lines: queue.Queue[str | None] = queue.Queue(MOST_WAITING)
        self._thread = threading.Thread(target=self._send, name="run-log", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.line(None)
        self._thread.join(timeout=10)

    def __call__(self, event: Event) -> None:
        if not isinstance(event, ClientTrained):  # one line per round and failure is enough to watch
            self.line(event.model_dump_json())

    def line(self, text: str | None) -> None:
        try:
            self._lines.put_nowait(text)
        except queue.Full:
            logger.warning("the run's log can't be sent as fast as it is written")

    def _send(self) -> None:
        over = False
        while not over:
            lines = [self._lines.get()]
            while not self._lines.empty():
                lines.append(self._lines.get())
            over = None in lines
            text = "".join(f"{line}\n" for line in lines if line is not None)
            try:
                if text:
                    self._task.push_log(self._run_id, text)
            except Exception as error:
                logger.warning("log lines were not taken: %s", error)
