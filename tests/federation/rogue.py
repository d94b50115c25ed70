"""A server that does not play by the rules: it sends sites what it likes, through the real SuperLink.

It stands in for the executor, which is held still meanwhile; everything else (front, SuperNodes, agents) is real.
"""

import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
from flwr.app import ConfigRecord, Message, RecordDict

from fedplat import wire
from fedplat.consortium.signed_job import SignedJob
from fedplat.flower.run_grid import RunGrid
from fedplat.flower.tasks import SERVER_TASK, RuntimeApi, Task, TaskQueue
from fedplat.job import Job
from fedplat.tasks import load_task
from fedplat.wire import Identity
from server_app.evaluation import GlobalModel
from simulations.local_federation import LocalFederation


class RogueServer:
    """Asks one site whatever a test wants."""

    def __init__(self, grid: RunGrid, job: Job) -> None:
        self._grid, self._job = grid, job
        self.initial = GlobalModel(job, load_task(job)).initial

    def request(self, arrays: Mapping[str, np.ndarray] | None = None, **config: object) -> RecordDict:
        """A request as an honest server makes it, with a test's own additions."""
        identity = Identity(self._job.digest, 1, 1).record()
        for key, value in config.items():
            identity[key.replace("_", "-")] = value  # type: ignore[assignment]
        sent = self.initial if arrays is None else arrays
        return RecordDict({wire.CONFIG: identity, wire.ARRAYS: wire.encode_arrays(sent)})

    def ask(self, site: str, content: RecordDict, kind: str = "train", deadline_s: float = 60.0) -> Message:
        node = next(node.node_id for node in self._grid.get_nodes() if node.name == site)
        (message_id,) = self._grid.push_messages([Message(content, dst_node_id=node, message_type=kind)])
        deadline = time.monotonic() + deadline_s
        while time.monotonic() < deadline:
            for reply in self._grid.pull_messages([message_id]):
                return reply
            time.sleep(0.1)
        raise TimeoutError(f"{site} did not answer")

    def refusal(self, site: str, content: RecordDict, kind: str = "train") -> str:
        reply = self.ask(site, content, kind)
        refused = wire.records(reply.content, ConfigRecord).get(wire.REFUSED)
        assert refused is not None, "the site answered"
        assert wire.SITE in reply.content, "a refusal carries the head of the site's ledger too"
        return str(refused["reason"])


@contextmanager
def rogue_server(
    federation: LocalFederation, signed: str, archive: bytes | None = None, job: Job | None = None
) -> Iterator[RogueServer]:
    job = Job.from_canonical(SignedJob.parse(signed).job) if job is None else job
    kit = federation.server
    executor = federation.process_id("server", "executor")
    assert executor is not None
    os.kill(executor, signal.SIGSTOP)
    try:
        with federation.control() as control:
            run_id = control.start_run(signed, archive=archive)
        api = RuntimeApi(kit.superlink_address, kit.ca.read_bytes(), kit.superexec_secret.read_bytes())
        queue, token = TaskQueue(api, SERVER_TASK), None
        for _ in range(200):
            token = queue.acquire()
            if token is not None:
                break
            time.sleep(0.05)
        assert token is not None
        with Task(api, token, "flwr-serverapp") as task:
            _, run = task.pull_input()
            assert run.run_id == run_id
            yield RogueServer(RunGrid(api, token, run), job)
            task.finish()
    finally:
        os.kill(executor, signal.SIGCONT)
