"""Collect a round's updates: check each as it arrives, reduce it or keep it, retry what failed.

Mean-based strategies get one reply, the mean. The others (medians, Krum, Bulyan) get every accepted reply,
sorted by client name, so that their result doesn't depend on the order of arrival either. Under client-level privacy
the one reply is the noisy mean, also if nobody answered; each client counts at most once, whatever it sends.
An adaptive clip norm is taken out of what a strategy sees and averaged here.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict

from fedplat import wire
from fedplat.errors import JobError
from fedplat.events import ClientFailed, ClientTrained, Event, RoundFinished
from fedplat.federation import natural_order
from fedplat.job import Job
from fedplat.model import Arrays
from fedplat.wire import Identity
from privacy.clip_norm import RANGE
from server_app.adaptive_clip import without_clip_norm
from server_app.checks import LOSS, Refused, Report, Rules, Update, check_stack, check_update
from server_app.exchange import Exchange
from server_app.mean import MeanReducer
from server_app.private_mean import PrivateMean
from server_app.stack import UpdateStack

Kind = Literal["error", "late", "refused"]
LAST_ATTEMPT = 2


@dataclass
class Tally:
    """What became of a round's cohort."""

    reports: dict[str, Report] = field(default_factory=dict)
    failures: dict[str, Kind] = field(default_factory=dict)
    reasons: Counter[str] = field(default_factory=Counter)
    strays: int = 0
    """Replies that answered nothing: duplicates and unknown senders."""
    bytes_up: int = 0
    bytes_down: int = 0

    def count(self, kind: Kind) -> int:
        return sum(found == kind for found in self.failures.values()) + (self.strays if kind == "refused" else 0)

    def mean_metrics(self) -> dict[str, float]:
        """Means weighted by examples; `fsum` is exact, so the order of arrival doesn't show."""
        means = {}
        for name in sorted({name for report in self.reports.values() for name in report.metrics}):
            having = [report for report in self.reports.values() if name in report.metrics]
            total = sum(report.num_examples for report in having)
            means[name] = math.fsum(report.num_examples * report.metrics[name] for report in having) / total
        return means

    def summary(self, number: int, aggregated: bool, seconds: float) -> RoundFinished:
        return RoundFinished(
            round=number,
            aggregated=aggregated,
            accepted=len(self.reports),
            failed=self.count("error"),
            late=self.count("late"),
            refused=self.count("refused"),
            metrics=self.mean_metrics() if self.reports else {},
            seconds=seconds,
            bytes_down=self.bytes_down,
            bytes_up=self.bytes_up,
        )


class Collector:
    """One training phase. `reduce`: the strategy needs only the mean; `private`: a noisy mean in its place."""

    def __init__(
        self,
        job: Job,
        round_number: int,
        model: Arrays,
        name_of: Mapping[int, str],
        reduce: bool,
        emit: Callable[[Event], None],
        private: PrivateMean | None = None,
    ) -> None:
        self._job, self._round, self._model, self._name_of = job, round_number, model, name_of
        self._digest = job.digest
        self._rules = Rules.of(job)
        self._emit = emit
        self._private = private
        self._reducer = private if private is not None else MeanReducer(model) if reduce else None
        self._clip_norms = MeanReducer({n: a for n, a in model.items() if n == wire.CLIP_NORM})
        self._next_clip_norm: np.ndarray | None = None
        self._kept: dict[str, Message] = {}
        self._template: Message | None = None
        self._attempts: dict[int, int] = {}
        self.tally = Tally()

    def run(self, exchange: Exchange, requests: list[Message]) -> None:
        """Send the requests and take replies until all are in or the deadline has passed."""
        self._send(exchange, requests)
        for request, reply in exchange.updates() if self._reducer is not None else exchange.replies():
            if isinstance(reply, UpdateStack):
                assert isinstance(request, list)
                self._stack_arrived(exchange, request, reply)
            elif request is None:
                self._stray(reply)
            else:
                assert isinstance(request, Message)
                self._arrived(exchange, request, reply)
            del reply  # before the next one is fetched: both may be large
        for request in exchange.missing():
            reason = f"no reply within {self._job.cohort.deadline_s:g} s"
            self._failed(None, request, "late", reason)

    def replies(self) -> list[Message]:
        """What the strategy gets; to be called once: the sums are given up for it."""
        if self._reducer is None:
            return [self._kept[name] for name in natural_order(list(self._kept))]
        if self._reducer.count == 0 and self._private is None:
            return []
        identity = Identity(self._digest, self._round, 1, "mean")
        mean = self._reducer.mean()
        self._reducer.forget()
        self._next_clip_norm = mean.get(wire.CLIP_NORM)
        arrays = wire.encode_arrays(without_clip_norm(mean))
        content = wire.reply_content(identity, self._reducer.total_weight, self.tally.mean_metrics(), arrays)
        if self._private is None:
            wire.records(content, MetricRecord)[wire.METRICS][wire.NUM_UPDATES] = self._reducer.count
        if self._template is None:  # noise alone: nobody was asked, or nobody answered
            return [Message(content, dst_node_id=1, message_type=MessageType.TRAIN)]
        return [Message(content, reply_to=self._template)]

    def clip_norm(self) -> Arrays:
        """The next adaptive clip norm, if the job has one: what strategies don't see."""
        if wire.CLIP_NORM not in self._model:
            return {}
        if self._next_clip_norm is None:
            self._next_clip_norm = self._clip_norms.mean()[wire.CLIP_NORM]
        return {wire.CLIP_NORM: np.clip(self._next_clip_norm, *RANGE)}

    def _send(self, exchange: Exchange, requests: list[Message]) -> None:
        self.tally.bytes_down += _payload(requests)
        exchange.send(requests)

    def _attempt(self, request: Message) -> int:
        return self._attempts.get(request.metadata.dst_node_id, 1)

    def _stray(self, reply: Message) -> None:
        name = self._name_of.get(reply.metadata.src_node_id, f"node {reply.metadata.src_node_id}")
        known = name in self.tally.reports or name in self.tally.failures
        reason = "duplicate reply" if known else "unknown sender: nobody asked it in this round"
        self.tally.strays += 1
        self._emit_failure(name, "refused", reason, attempt=0)

    def _arrived(self, exchange: Exchange, request: Message, reply: Message) -> None:
        client = self._name_of[request.metadata.dst_node_id]
        if reply.has_error():
            self._failed(exchange, request, "error", last_line(reply.error.reason))
            return
        self.tally.bytes_up += wire.payload_bytes(reply.content)
        expected = Identity(self._digest, self._round, self._attempt(request), client)
        try:
            rules = self._rules
            update = check_update(
                reply, request, expected, self._model, rules.max_norm, rules.examples, private=rules.private
            )
            self._accept(expected, request, reply, update)
        except Refused as refusal:
            self._failed(exchange, request, "refused", str(refusal))
        except Exception as error:  # whatever a client sends may cost it its place in the round, never the run
            self._failed(exchange, request, "refused", f"{type(error).__name__}: {error}")

    def _accept(self, identity: Identity, request: Message, reply: Message, update: Update) -> None:
        if identity.client in self.tally.reports:
            raise Refused("this client's update is counted already")
        if self._reducer is None:
            # Rebuilt with fixed names: Flower's strategies refuse the whole round if one reply has another metric.
            metrics = {name: update.metrics[name] for name in (LOSS,) if name in update.metrics}
            arrays = self._for_strategy(reply, update)
            content = wire.reply_content(identity, update.num_examples, metrics, arrays)
            self._kept[identity.client] = Message(content, reply_to=request)
        else:
            try:
                self._reducer.add(update.arrays, update.num_examples)
            except ValueError as error:
                raise Refused(str(error)) from None
            self._template = request
        self._count(identity.client, Report(update.num_examples, update.metrics), update.norm)

    def _for_strategy(self, reply: Message, update: Update) -> ArrayRecord:
        if wire.CLIP_NORM not in update.arrays:
            return wire.records(reply.content, ArrayRecord)[wire.ARRAYS]
        self._clip_norms.add({wire.CLIP_NORM: update.arrays[wire.CLIP_NORM]}, update.num_examples)
        return wire.encode_arrays(without_clip_norm(update.arrays))

    def _stack_arrived(self, exchange: Exchange, requests: list[Message], stack: UpdateStack) -> None:
        """Many updates at once: the same checks, the same bits, without a message for each."""
        clients = [self._name_of[request.metadata.dst_node_id] for request in requests]
        expected = [
            Identity(self._digest, self._round, self._attempt(request), client)
            for request, client in zip(requests, clients, strict=True)
        ]
        reasons, norms = check_stack(stack, expected, self._model, self._rules)
        rows = [row for row, reason in enumerate(reasons) if reason is None]
        if rows and self._reducer is not None:
            chosen = slice(None) if len(rows) == len(stack) else rows
            arrays = {name: array[chosen] for name, array in stack.arrays.items()}
            self._reducer.add_stack(arrays, [stack.num_examples[row] for row in rows])
            self._template = requests[rows[0]]
        self.tally.bytes_up += _payload(requests)  # an update is as large as the model it answers
        for row, reason in enumerate(reasons):
            if reason is None:
                self._count(clients[row], Report(stack.num_examples[row], stack.row_metrics(row)), norms[row])
            else:
                self._failed(exchange, requests[row], "refused", reason)

    def _count(self, client: str, report: Report, norm: float) -> None:
        self.tally.failures.pop(client, None)  # a retry made it good
        self.tally.reports[client] = report
        self._emit(
            ClientTrained(
                round=self._round,
                client=client,
                num_examples=report.num_examples,
                # What an update's norm tells of one client is not part of the release.
                update_norm=norm if self._private is None else math.nan,
                metrics=report.metrics,
            )
        )

    def _failed(self, exchange: Exchange | None, request: Message, kind: Kind, reason: str) -> None:
        """Note the failure, then do what cohort.on_failure says."""
        client, attempt = self._name_of[request.metadata.dst_node_id], self._attempt(request)
        self.tally.failures[client] = kind
        self.tally.reasons[reason] += 1
        self._emit_failure(client, kind, reason, attempt)
        policy = self._job.cohort.on_failure
        if policy == "stop":
            raise JobError(f"round {self._round}: {client} {kind}: {reason} (cohort.on_failure = 'stop')")
        if policy == "retry" and exchange is not None and attempt < LAST_ATTEMPT and not exchange.is_over():
            self._attempts[request.metadata.dst_node_id] = attempt + 1
            self._send(exchange, [_next_attempt(request, attempt + 1)])

    def _emit_failure(self, client: str, kind: Kind, reason: str, attempt: int) -> None:
        self._emit(
            ClientFailed(round=self._round, client=client, phase="train", kind=kind, reason=reason, attempt=attempt)
        )


def _next_attempt(request: Message, attempt: int) -> Message:
    content = RecordDict(dict(request.content))
    config = wire.records(content, ConfigRecord)[wire.CONFIG].copy()
    config["attempt"] = attempt
    content[wire.CONFIG] = config
    metadata = request.metadata
    return Message(content, dst_node_id=metadata.dst_node_id, message_type=metadata.message_type)


def _payload(requests: list[Message]) -> int:
    """Bytes of arrays in the requests. A strategy sends one content to all: it is measured once."""
    contents = {id(request.content): request.content for request in requests}
    sizes = {key: wire.payload_bytes(content) for key, content in contents.items()}
    return sum(sizes[id(request.content)] for request in requests)


def last_line(reason: str | None) -> str:
    """The last line of a traceback says what happened; the rest is for the client's own log."""
    lines = [line.strip() for line in (reason or "").splitlines() if line.strip()]
    return lines[-1] if lines else "no reason given"
