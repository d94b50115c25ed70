"""Evaluation at the clients: each measures the new model on its own held-out examples."""

from collections.abc import Callable

from flwr.app import Message

from fedplat import wire
from fedplat.events import ClientEvaluated, ClientFailed, Event
from fedplat.job import Job
from fedplat.wire import Identity
from server_app.checks import LOSS, Refused, Report, allowed_examples, check_report
from server_app.collect import Kind, Tally, last_line
from server_app.exchange import Exchange


class EvaluationPhase:
    """One round's evaluation at the clients."""

    def __init__(self, job: Job, round_number: int, name_of: dict[int, str], emit: Callable[[Event], None]) -> None:
        self._digest, self._round, self._name_of, self._emit = job.digest, round_number, name_of, emit
        self._deadline_s = job.cohort.deadline_s
        # A client may have too few examples to hold any out: it answers with none, which is no failure.
        self._examples = allowed_examples(job.cohort.clients, least=0)
        self.tally = Tally()
        self.replies: dict[str, Message] = {}

    def run(self, exchange: Exchange, requests: list[Message]) -> None:
        exchange.send(requests)
        for request, reply in exchange.replies():
            if request is not None:
                self._arrived(request, reply)
        for request in exchange.missing():
            self._failed(request, "late", f"no reply within {self._deadline_s:g} s")

    def _arrived(self, request: Message, reply: Message) -> None:
        client = self._name_of[request.metadata.dst_node_id]
        if reply.has_error():
            self._failed(request, "error", last_line(reply.error.reason))
            return
        try:
            identity = Identity(self._digest, self._round, 1, client)
            report = check_report(reply, request, identity, self._examples)
        except Refused as refusal:
            self._failed(request, "refused", str(refusal))
            return
        if report.num_examples:
            self._accept(client, identity, request, report)

    def _accept(self, client: str, identity: Identity, request: Message, report: Report) -> None:
        self.tally.reports[client] = report
        # Rebuilt with fixed names: Flower's strategies refuse the whole round if one reply has another metric.
        content = wire.reply_content(identity, report.num_examples, {LOSS: report.metrics.get(LOSS, 0.0)})
        self.replies[client] = Message(content, reply_to=request)
        self._emit(
            ClientEvaluated(round=self._round, client=client, num_examples=report.num_examples, metrics=report.metrics)
        )

    def _failed(self, request: Message, kind: Kind, reason: str) -> None:
        client = self._name_of[request.metadata.dst_node_id]
        self._emit(
            ClientFailed(round=self._round, client=client, phase="evaluate", kind=kind, reason=reason, attempt=1)
        )
