"""A run in numbers, read from its event log: what `--json`, `runs list` and `runs compare` print."""

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from fedplat.events import (
    ClientTrained,
    Evaluated,
    Event,
    Interrupted,
    Metrics,
    PrivacySpent,
    RoundFinished,
    RunFailed,
    RunFinished,
    RunStarted,
    read_events,
)
from fedplat.rundir import RunDirectory

Status = Literal["finished", "failed", "interrupted", "unfinished", "corrupted"]


@dataclass
class Summary:
    """Totals over a run; curves are (round, value) pairs."""

    run: str = ""
    status: Status = "unfinished"
    clients: int = 0
    planned_rounds: int = 0
    rounds: int = 0
    updates: int = 0
    failed: int = 0
    training_s: float = 0.0
    bytes_up: int = 0
    bytes_down: int = 0
    model_sha256: str | None = None
    reason: str | None = None
    server: dict[int, Metrics] = field(default_factory=dict)
    on_clients: dict[int, Metrics] = field(default_factory=dict)
    train: dict[int, Metrics] = field(default_factory=dict)
    best_round: int | None = None
    privacy: dict[int, PrivacySpent] = field(default_factory=dict)
    ledger: str | None = None
    witnesses: dict[str, float] = field(default_factory=dict)

    @property
    def clients_per_s(self) -> float:
        return self.updates / self.training_s if self.training_s else 0.0

    def final(self, metric: str) -> float | None:
        """The last value measured at the server."""
        return self.server[max(self.server)].get(metric) if self.server else None

    def final_on_clients(self, metric: str) -> float | None:
        """The last mean over clients' held-out examples."""
        return self.on_clients[max(self.on_clients)].get(metric) if self.on_clients else None

    @property
    def spent(self) -> PrivacySpent | None:
        """What the run has cost in privacy; None if it was not private."""
        return self.privacy[max(self.privacy)] if self.privacy else None

    def _privacy_json(self) -> dict[str, Any]:
        if self.spent is None:
            return {}
        kept = {"epsilon", "delta", "unit", "relation", "accountant", "trusts_server", "insecure_noise"}
        return {**self.spent.model_dump(include=kept), "ledger": self.ledger, "witnesses": self.witnesses}

    def as_json(self, wall_s: float) -> dict[str, Any]:
        """The contract of `--json`: these keys stay; further ones if clients evaluated, or if it was private."""
        held_out = {f"clients_{name}": self.final_on_clients(name) for name in ("accuracy", "loss")}
        values = {
            "run": self.run,
            "rounds": self.rounds,
            "clients": self.clients,
            "test_accuracy": self.final("accuracy"),
            "test_loss": self.final("loss"),
            "wall_s": round(wall_s, 3),
            "clients_per_s": round(self.clients_per_s, 2),
            "bytes_up": self.bytes_up,
            "bytes_down": self.bytes_down,
            "model_sha256": self.model_sha256,
            **(held_out if self.on_clients else {}),
            **self._privacy_json(),
        }
        # JSON has no NaN: a diverged loss is null.
        return {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in values.items()}


def summarise(run: RunDirectory) -> Summary:
    summary = Summary(run=str(run.path), ledger=str(run.ledger_file) if run.ledger_file.exists() else None)
    for event in read_events(run.events_file):
        add_event(summary, event)
    return summary


def add_event(summary: Summary, event: Event) -> None:
    match event:
        case RunStarted():
            summary.clients, summary.planned_rounds, summary.witnesses = event.clients, event.rounds, event.witnesses
        case RoundFinished():
            _add_round(summary, event)
        case Evaluated(where="server"):
            summary.server[event.round] = event.metrics
            summary.best_round = event.round if event.best else summary.best_round
        case Evaluated():
            summary.on_clients[event.round] = event.metrics
        case PrivacySpent():
            summary.privacy[event.round] = event
        case RunFinished():
            summary.status, summary.reason, summary.model_sha256 = (
                "finished",
                event.reason,
                event.model_sha256,
            )
        case RunFailed():
            summary.status, summary.reason = "failed", event.reason
        case Interrupted():
            summary.status = "interrupted"
        case _:
            pass


def _add_round(summary: Summary, event: RoundFinished) -> None:
    summary.rounds = event.round
    summary.updates += event.accepted
    summary.failed += event.failed + event.late + event.refused
    summary.training_s += event.seconds
    summary.bytes_up += event.bytes_up
    summary.bytes_down += event.bytes_down
    summary.train[event.round] = event.metrics


@dataclass
class ClientSummary:
    """One client over a whole run."""

    rounds: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    num_examples: int = 0


def summarise_clients(run: RunDirectory) -> dict[str, ClientSummary]:
    clients: dict[str, ClientSummary] = {}
    for event in read_events(run.events_file):
        if isinstance(event, ClientTrained):
            client = clients.setdefault(event.client, ClientSummary())
            client.rounds.append(event.round)
            client.losses.append(event.metrics.get("loss", float("nan")))
            client.norms.append(event.update_norm)
            client.num_examples = event.num_examples
    return clients
