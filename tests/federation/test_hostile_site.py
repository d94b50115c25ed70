"""What a site (or whoever has its keys) can't do to a run: real SuperLink, front and SuperNodes, a rogue agent."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from fedplat import wire
from fedplat.cli.operator import ready_for_sites, sign
from fedplat.events import ClientFailed, RoundFinished, RunFinished, read_events
from fedplat.flower.tasks import CLIENT_TASK, ClientTask, RuntimeApi, TaskQueue
from fedplat.packing import unpack
from fedplat.rundir import list_runs
from fedplat.wire import Identity
from simulations.local_federation import LocalFederation
from tests.federation.requirements import needs_nginx

pytestmark = [pytest.mark.slow, needs_nginx]
ROGUE = "site-2"
Answer = Callable[[RecordDict], RecordDict]


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalFederation]:
    with LocalFederation(tmp_path_factory.mktemp("f"), 2, environment={"OMP_NUM_THREADS": "1"}) as started:
        started.wait_until_online()
        time.sleep(5)  # the agents come up after their SuperNodes
        agent = started.process_id(ROGUE, "agent")
        assert agent is not None
        os.kill(agent, signal.SIGSTOP)
        yield started
        os.kill(agent, signal.SIGCONT)


class RogueAgent(threading.Thread):
    """Answers everything that the site is asked with what a test makes of it."""

    def __init__(self, federation: LocalFederation, answer: Answer) -> None:
        super().__init__(daemon=True)
        kit = federation.site(ROGUE)
        secret = kit.superexec_secret.read_bytes()
        self._api = RuntimeApi(f"127.0.0.1:{kit.node_port}", kit.local_certificate.read_bytes(), secret)
        self._answer, self.over, self.served = answer, threading.Event(), 0

    def run(self) -> None:
        queue = TaskQueue(self._api, CLIENT_TASK)
        while not self.over.is_set():
            token = queue.acquire()
            if token is None:
                time.sleep(0.05)
                continue
            with ClientTask(self._api, token) as task:
                assignment = task.pull_assignment()
                message = task.pull_message(assignment, 10_000, 1 << 30)
                task.answer(assignment, Message(self._answer(unpack(message.content)), reply_to=message))
                self.served += 1


def honest(content: RecordDict, client: str = "client-1") -> RecordDict:
    """The update of a client that has learned nothing."""
    asked = Identity.of(content, wire.CONFIG)
    identity = Identity(asked.job, asked.round, asked.attempt, client)
    arrays = wire.records(content, ArrayRecord)[wire.ARRAYS]
    return wire.reply_content(identity, 10, {"loss": 1.0}, arrays)


def deep_statement(content: RecordDict) -> RecordDict:
    reply = honest(content)
    reply[wire.SITE] = ConfigRecord({"statement": "[" * 100_000})
    return reply


def giant(content: RecordDict) -> RecordDict:
    arrays = {f"a{number}": np.random.default_rng(number).random(1 << 19) for number in range(8)}
    return RecordDict({wire.ARRAYS: wire.encode_arrays(arrays)})


def somebody_else(content: RecordDict) -> RecordDict:
    return honest(content, "client-0")


def not_a_number(content: RecordDict) -> RecordDict:
    reply = honest(content)
    arrays = wire.decode_arrays(wire.records(reply, ArrayRecord)[wire.ARRAYS])
    reply[wire.ARRAYS] = wire.encode_arrays({name: array * np.nan for name, array in arrays.items()})
    return reply


def nothing(content: RecordDict) -> RecordDict:
    return RecordDict()


def odd_records(content: RecordDict) -> RecordDict:
    return RecordDict(
        {wire.REFUSED: MetricRecord({"x": 1}), wire.AGAIN: MetricRecord({"x": 1}), wire.SITE: MetricRecord({})}
    )


CASES: dict[str, tuple[Answer, str | None]] = {
    "a statement that nests without end": (deep_statement, None),
    "a giant reply": (giant, "can't be read"),
    "another client's name": (somebody_else, "wrong client"),
    "no numbers": (not_a_number, "NaN"),
    "nothing at all": (nothing, "identity"),
    "records of the wrong kind": (odd_records, "identity"),
}


@pytest.mark.parametrize("case", list(CASES))
def test_whatever_a_site_sends_costs_its_place_never_the_run(federation, tiny_job, case):
    answer, reason = CASES[case]
    seed = 100 + list(CASES).index(case)
    settings = {"cohort__clients": 2, "cohort__fraction": 1.0, "job__rounds": 2, "job__seed": seed}
    job = ready_for_sites(tiny_job(**settings, cohort__deadline_s=60.0), federation.operator)
    agent = RogueAgent(federation, answer)
    agent.start()
    try:
        with federation.control() as control:
            run_id = control.start_run(sign(job, federation.operator))
            deadline = time.monotonic() + 120
            while not control.runs(run_id)[0].status.startswith("finished"):
                assert time.monotonic() < deadline, "the run did not end"
                time.sleep(0.2)
            assert control.runs(run_id)[0].status == "finished:completed"
    finally:
        agent.over.set()
        agent.join(10)
    (run,) = (run for run in list_runs(federation.server.runs_folder) if run.job().digest == job.digest)
    events = read_events(run.events_file)
    assert any(isinstance(event, RunFinished) for event in events) and agent.served >= 2
    failures = [event for event in events if isinstance(event, ClientFailed)]
    accepted = [event.accepted for event in events if isinstance(event, RoundFinished)]
    if reason is None:  # what is wrong with the statement is not the update's fault
        assert accepted == [2, 2] and not failures
    else:
        assert accepted == [1, 1]
        assert {event.client for event in failures} == {"client-1"}
        assert all(reason in event.reason for event in failures), failures


def test_the_servers_memory_does_not_follow_a_giant_reply(federation):
    """After the giant reply above: the executor's peak stays far below what was sent (32 MB) times a few."""
    number = federation.process_id("server", "executor")
    peak = next(line for line in Path(f"/proc/{number}/status").read_text().splitlines() if line.startswith("VmHWM"))
    assert int(peak.split()[1]) < 1_000_000, "kilobytes"
