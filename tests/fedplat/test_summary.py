"""A run in numbers: totals are sums over the events that count."""

from pathlib import Path

import pytest

from fedplat.events import (
    ClientTrained,
    Evaluated,
    Event,
    EventLog,
    Interrupted,
    Resumed,
    RoundFinished,
    RunFailed,
    RunFinished,
    RunStarted,
)
from fedplat.job import default_job
from fedplat.rundir import RunDirectory
from fedplat.summary import Summary, summarise, summarise_clients

STARTED = RunStarted(run="r", job_digest="d", clients=8, rounds=3, parameters=10, versions={})


def finished(number: int, accepted: int = 4) -> RoundFinished:
    return RoundFinished(
        round=number, aggregated=True, accepted=accepted, failed=1, late=2, refused=3, metrics={"loss": 1 / number},
        seconds=0.5, bytes_down=100, bytes_up=50,
    )  # fmt: skip


def evaluated(number: int, accuracy: float, best: bool = False, where: str = "server") -> Evaluated:
    return Evaluated.model_validate(
        {
            "round": number,
            "where": where,
            "num_examples": 9,
            "metrics": {"accuracy": accuracy, "loss": 2.0},
            "best": best,
        }
    )


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "run", default_job())


def summary_of(run: RunDirectory, *events: Event) -> Summary:
    log = EventLog(run.events_file)
    for event in events:
        log.append(event)
    log.close()
    return summarise(run)


def test_totals_are_sums_over_rounds(run: RunDirectory) -> None:
    summary = summary_of(
        run, STARTED, evaluated(0, 0.1), finished(1), evaluated(1, 0.6, best=True), evaluated(1, 0.4, where="clients"),
        finished(2, accepted=2), evaluated(2, 0.5), RunFinished(round=2, reason="patience", model_sha256="abc"),
    )  # fmt: skip
    assert (summary.status, summary.reason, summary.model_sha256) == ("finished", "patience", "abc")
    assert (summary.clients, summary.planned_rounds, summary.rounds) == (8, 3, 2)
    assert (summary.updates, summary.failed, summary.training_s) == (6, 12, 1.0)
    assert (summary.bytes_up, summary.bytes_down) == (100, 200)
    assert {n: m["accuracy"] for n, m in summary.server.items()} == {0: 0.1, 1: 0.6, 2: 0.5}
    assert {n: m["accuracy"] for n, m in summary.on_clients.items()} == {1: 0.4}
    assert {n: m["loss"] for n, m in summary.train.items()} == {1: 1.0, 2: 0.5}
    assert summary.best_round == 1
    assert summary.final("accuracy") == 0.5
    assert summary.final("nothing") is None
    assert summary.clients_per_s == 6.0


def test_resumed_run_counts_no_round_twice(run: RunDirectory) -> None:
    undone = [finished(2, accepted=1), evaluated(2, 0.9, best=True), RunFailed(round=2, reason="disk full")]
    straight = [STARTED, finished(1), evaluated(1, 0.5, best=True)]
    redone = [finished(2), evaluated(2, 0.7, best=True)]
    summary = summary_of(run, *straight, *undone, Resumed(round=1), *redone)
    assert (summary.rounds, summary.updates, summary.status, summary.reason) == (2, 8, "unfinished", None)
    assert summary.final("accuracy") == 0.7


@pytest.mark.parametrize(
    ("ending", "status"),
    [
        (None, "unfinished"),
        (Interrupted(round=1), "interrupted"),
        (RunFailed(round=1, reason="disk full"), "failed"),
        (RunFinished(round=1, reason="rounds", model_sha256="x"), "finished"),
    ],
)
def test_status_is_how_the_log_ends(run: RunDirectory, ending: Event | None, status: str) -> None:
    events = [STARTED, finished(1)] + ([] if ending is None else [ending])
    assert summary_of(run, *events).status == status


def test_json_contract_keeps_its_keys(run: RunDirectory) -> None:
    record = summary_of(run, STARTED, finished(1), evaluated(1, 0.5)).as_json(wall_s=1.23456)
    assert record == {
        "run": str(run.path), "rounds": 1, "clients": 8, "test_accuracy": 0.5, "test_loss": 2.0, "wall_s": 1.235,
        "clients_per_s": 8.0, "bytes_up": 50, "bytes_down": 100, "model_sha256": None,
    }  # fmt: skip


def test_run_without_events_has_empty_totals(run: RunDirectory) -> None:
    summary = summary_of(run)
    assert (summary.rounds, summary.clients_per_s, summary.final("accuracy")) == (0, 0.0, None)


def test_clients_are_summed_up_by_name(run: RunDirectory) -> None:
    def trained(number: int, client: str, loss: float) -> ClientTrained:
        return ClientTrained(
            round=number, client=client, num_examples=5, update_norm=number / 2, metrics={"loss": loss}
        )

    summary_of(run, trained(1, "a", 1.0), trained(1, "b", 2.0), trained(2, "a", 0.5))
    clients = summarise_clients(run)
    assert (clients["a"].rounds, clients["a"].losses, clients["a"].norms) == ([1, 2], [1.0, 0.5], [0.5, 1.0])
    assert (clients["b"].rounds, clients["b"].num_examples) == ([1], 5)
