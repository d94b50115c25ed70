"""Admission: where privacy is claimed for secret sampling, every site pays for the whole job before it can be sampled.

A site that paid only when it is asked to train would pay for the rounds it was sampled in, and amplification by
sampling assumes that it pays for all of them. So each round begins by asking every connected client that has not agreed
yet, sampled or not; who refuses or stays silent is not asked to train. In a simulation the run's own ledger is
charged.
"""

from collections.abc import Mapping

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fedplat.job import Job
from fedplat.wire import CONFIG, Identity
from server_app.collect import last_line
from server_app.exchange import Exchange

ADMIT = "query.admit"


def needs_admission(job: Job) -> bool:
    """Does the job's claim rest on cohorts that are drawn secretly?"""
    privacy = job.privacy
    return privacy is not None and privacy.unit == "client" and privacy.sampling in ("poisson", "fixed")


class Admissions:
    """Which clients of a run have reserved the whole job."""

    def __init__(self, job: Job, grid: Grid, needed: bool) -> None:
        self._grid, self._needed = grid, needed
        self._deadline_s = job.cohort.deadline_s
        self._config = Identity(job.digest, 0, attempt=1).record()
        self._admitted: set[str] = set()
        self._reasons: dict[str, str] = {}
        self._asked_in = 0

    def among(self, number: int, connected: Mapping[str, int]) -> dict[str, int]:
        """The connected clients that may be asked in this round. Asks those that have not agreed yet, once a round."""
        if not self._needed:
            return dict(connected)
        if number != self._asked_in:
            self._asked_in = number
            self._ask({client: node for client, node in connected.items() if client not in self._admitted})
        return {client: node for client, node in connected.items() if client in self._admitted}

    def why_not(self, client: str) -> str:
        """Why a client is not among those that may be asked."""
        return self._reasons.get(client, "not connected")

    def _ask(self, nodes: Mapping[str, int]) -> None:
        self._reasons = dict.fromkeys(nodes, f"no answer to {ADMIT} within {self._deadline_s:g} s")
        if not nodes:
            return
        name_of = {node: client for client, node in nodes.items()}
        exchange = Exchange(self._grid, self._deadline_s)
        content = RecordDict({CONFIG: self._config})
        exchange.send([Message(content, dst_node_id=node, message_type=ADMIT) for node in nodes.values()])
        for request, reply in exchange.replies():
            if request is None:
                continue
            client = name_of[request.metadata.dst_node_id]
            if reply.has_error():
                self._reasons[client] = f"not admitted: {last_line(reply.error.reason)}"
            else:
                self._admitted.add(client)
                del self._reasons[client]
