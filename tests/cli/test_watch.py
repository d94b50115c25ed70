"""Watching from afar: events are read from log lines, over connections that break."""

import json
from collections.abc import Iterator

import pytest
from rich.console import Console

from fedplat.cli import watch
from fedplat.cli.watch import (
    budgets_shown,
    considered,
    directory_of,
    event_of,
    follow_run,
    lines_of,
    print_logs,
    progress_of,
    sites_table,
    status_table,
)
from fedplat.consortium.identity import SigningKey
from fedplat.consortium.signed_job import SignedJob
from fedplat.errors import JobError
from fedplat.events import Checkpointed, ClientFailed, Evaluated, Event, RoundFinished, RunFailed, RunFinished
from fedplat.flower.control import RunStatus

FINISHED = RunFinished(round=2, reason="rounds", model_sha256="ab" * 32)
MEASURED = Evaluated(round=2, where="server", num_examples=10, metrics={"accuracy": 0.75})


def round_finished(**counts: int) -> RoundFinished:
    numbers = {"accepted": 3, "failed": 0, "late": 0, "refused": 0} | counts
    return RoundFinished(
        round=1, aggregated=True, metrics={"loss": 0.5}, seconds=1.25, bytes_down=1, bytes_up=1, **numbers
    )


def lines(*events: Event) -> str:
    return "".join(event.model_dump_json() + "\n" for event in events)


class Recorded:
    """A server's answers, recorded: each run has statuses and pieces of log, a JobError is a broken connection."""

    def __init__(self, **runs: list[str | JobError]) -> None:
        self.pieces = {int(name[1:]): list(pieces) for name, pieces in runs.items()}
        self.statuses: dict[int, list[str | JobError]] = {number: [] for number in self.pieces}
        self.jobs, self.actions = dict.fromkeys(self.pieces, ""), dict.fromkeys(self.pieces, "")
        self.asked_after: list[float] = []

    def runs(self, run_id: int | None = None) -> list[RunStatus]:
        return [self._status(number) for number in self.pieces if run_id in (None, number)]

    def _status(self, number: int) -> RunStatus:
        queue = self.statuses[number]
        status = (queue.pop(0) if len(queue) > 1 else queue[0]) if queue else "finished:completed"
        if isinstance(status, JobError):
            raise status
        return RunStatus(number, status, "", self.jobs[number], self.actions[number])

    def logs(self, run_id: int, after: float = 0.0) -> Iterator[tuple[str, float]]:
        self.asked_after.append(after)
        pieces = self.pieces[run_id]
        for number in range(int(after), len(pieces)):
            piece = pieces[number]
            if isinstance(piece, JobError):
                pieces[number] = ""  # broken once
                raise piece
            yield piece, float(number + 1)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "ASK_AGAIN_S", 0.01)


def read(control: Recorded, follow: bool = False, run_id: int = 1) -> list[str]:
    return list(lines_of(control, run_id, follow))  # type: ignore[arg-type]


def test_lines_are_whole_wherever_the_log_was_cut():
    text = "run study\n" + lines(round_finished(), FINISHED)
    for size in (1, 3, 7, 50, len(text)):
        pieces: list[str | JobError] = [text[i : i + size] for i in range(0, len(text), size)]
        assert read(Recorded(r1=pieces)) == text.splitlines()


def test_a_broken_connection_loses_and_repeats_no_line():
    control = Recorded(r1=["one\ntw", JobError("gone"), "o\nthree\n"])
    control.statuses[1] = ["running", "running", "finished:completed"]
    assert read(control, follow=True) == ["one", "two", "three"]


def test_a_server_that_is_away_for_a_while_does_not_end_the_watching():
    """Its front restarts, the SuperLink is killed: neither the log nor the status can be had for a moment."""
    control = Recorded(r1=["one\n", JobError("gone"), "two\n"])
    control.statuses[1] = ["running", JobError("can't be reached"), JobError("can't be reached"), "finished:completed"]
    assert read(control, follow=True) == ["one", "two"]


def test_the_end_of_a_log_is_read_though_the_run_has_ended_meanwhile():
    control = Recorded(r1=["one\n", JobError("gone"), "two\n"])
    control.statuses[1] = ["finished:completed"]
    assert read(control, follow=True) == ["one", "two"]


def test_a_server_that_stays_away_is_told(monkeypatch):
    monkeypatch.setattr(watch, "PATIENCE_S", 0.05)
    control = Recorded(r1=["one\n"])
    control.statuses[1] = ["running", JobError("can't be reached")]
    with pytest.raises(JobError, match="can't be reached"):
        read(control, follow=True)


def test_without_follow_an_unreachable_server_is_told_at_once():
    control = Recorded(r1=["one\n"])
    control.statuses[1] = [JobError("can't be reached")]
    with pytest.raises(JobError, match="can't be reached"):
        read(control)


def test_a_run_that_has_not_started_has_no_lines_yet():
    control = Recorded(r1=["one\n"])
    control.statuses[1] = ["pending"]
    assert read(control) == [] and control.asked_after == []
    control.statuses[1] = ["pending", "starting", "finished:completed"]
    assert read(control, follow=True) == ["one"]


@pytest.mark.parametrize(
    "line", ["", "run study", "error: no", "{}", "null", '{"event": "unknown"}', '{"considered": {}}']
)
def test_a_line_that_is_no_event_is_none(line):
    assert event_of(line) is None


@pytest.mark.parametrize("event", [round_finished(), FINISHED, MEASURED, Checkpointed(round=3)])
def test_an_event_survives_the_log(event):
    assert event_of(event.model_dump_json()) == event


SENTENCES = [
    (round_finished(), "round 1: 3 updates in 1.2 s"),
    (round_finished(failed=1), "3 updates in 1.2 s, 1 failed, 0 late, 0 refused"),
    (round_finished(late=2), "0 failed, 2 late, 0 refused"),
    (round_finished(refused=1), "0 failed, 0 late, 1 refused"),
    (MEASURED, "round 2: accuracy 0.7500"),
    (ClientFailed(round=1, client="client-0", phase="train", kind="late", reason="no reply", attempt=1),
     "round 1: client-0 late: no reply"),
    (FINISHED, f"finished after round 2 (rounds), model sha256 {'ab' * 32}"),
    (RunFailed(round=1, reason="too few"), "failed after round 1: too few"),
    (Checkpointed(round=3), "round 3: committed"),
]  # fmt: skip


@pytest.mark.parametrize(("event", "sentence"), SENTENCES, ids=[sentence for _, sentence in SENTENCES])
def test_events_read_as_sentences(event, sentence, capsys):
    control = Recorded(r1=["plain\n" + lines(event)])
    print_logs(control, control.runs(1)[0], follow=False)  # type: ignore[arg-type]
    plain, told = capsys.readouterr().out.splitlines()
    assert plain == "plain" and told.endswith(sentence)
    assert ("failed," in told) == ("failed," in sentence)


# --- one run, all runs -----------------------------------------------------------------------------------


def signed(tiny_job) -> str:
    job = tiny_job(job__name="study", job__rounds=7)
    return SignedJob.sign(job, "alpha", "olga", SigningKey.generate(), 1.0).text()


def test_progress_is_the_newest_round_and_measurement(tiny_job):
    control = Recorded(r1=["run study-1\n" + lines(round_finished(), MEASURED), "torn {"])
    control.statuses[1], control.jobs[1] = ["running"], signed(tiny_job)
    row = progress_of(control, control.runs(1)[0])  # type: ignore[arg-type]
    assert (row["job"], row["round"], row["rounds"], row["directory"]) == ("study", 1, 7, "study-1")
    assert row["metrics"] == {"accuracy": 0.75} and row["status"] == "running"
    assert directory_of(control, control.runs(1)[0]) == "study-1"  # type: ignore[arg-type]


@pytest.mark.parametrize("job", ["", "junk", "{}", "[" * 100_000])
def test_somebodys_run_without_a_job_of_ours_is_a_row_too(job):
    control = Recorded(r1=["whatever\n"])
    control.jobs[1] = job
    row = progress_of(control, control.runs(1)[0])  # type: ignore[arg-type]
    assert (row["job"], row["round"], row["directory"]) == ("", 0, None)
    assert directory_of(control, control.runs(1)[0]) is None  # type: ignore[arg-type]


def test_answers_to_a_dry_run_are_found_among_other_lines():
    told = {"north": "accepts", "south": "policy.hours: closed"}
    control = Recorded(r1=["hello\n" + json.dumps({"considered": told}) + "\n"])
    assert considered(control, 1) == told  # type: ignore[arg-type]
    with pytest.raises(JobError, match="no site 'east'"):
        considered(Recorded(r1=["error: no site 'east'\n"]), 1)  # type: ignore[arg-type]
    with pytest.raises(JobError, match="ended without an answer"):
        considered(Recorded(r1=["hello\n"]), 1)  # type: ignore[arg-type]


def test_budgets_are_those_of_the_newest_run_that_shows_any():
    one, two = ({"north": {"digits/sample": epsilon}} for epsilon in (3.0, 2.0))
    control = Recorded(
        r1=[json.dumps({"budgets": one}) + "\n"], r2=[json.dumps({"budgets": two}) + "\n"], r3=["nothing\n"]
    )
    assert budgets_shown(control) == two  # type: ignore[arg-type]
    assert budgets_shown(Recorded(r1=["nothing\n"])) == {}  # type: ignore[arg-type]


def shown(table: object) -> str:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def test_tables_show_what_there_is():
    row = {"run": "1", "job": "study", "status": "running", "round": 3, "rounds": 7, "metrics": {"accuracy": 0.5}}
    text = shown(status_table([row | {"directory": "study-1"}, row | {"run": "2", "directory": None, "metrics": {}}]))
    assert "3/7" in text and "accuracy 0.5000" in text and "study-1" in text
    sites = [
        {"site": "north", "status": "online", "last_heartbeat": 1.0, "budget_left": {"digits/sample": 1.5}},
        {"site": "south", "status": "offline", "last_heartbeat": None, "budget_left": None},
    ]
    text = shown(sites_table(sites))
    assert "digits/sample 1.50" in text and "not shown" in text and "s ago" in text


# --- following to the end --------------------------------------------------------------------------------


def follow(control: Recorded, tiny_job, run_id: int = 1) -> Event | None:
    return follow_run(control, run_id, tiny_job(), Console(quiet=True))  # type: ignore[arg-type]


def test_following_ends_with_the_runs_last_event(tiny_job):
    assert follow(Recorded(r1=["run study\n" + lines(round_finished(), FINISHED)]), tiny_job) == FINISHED


def test_a_failed_run_is_told_in_its_own_words(tiny_job):
    control = Recorded(r1=["run study\nerror: round 2: 1 accepted updates\n"])
    control.statuses[1] = ["finished:failed"]
    with pytest.raises(JobError, match="run 1 finished:failed: round 2: 1 accepted updates"):
        follow(control, tiny_job)


def test_a_run_that_the_server_goes_on_with_is_followed_into_its_next_one(tiny_job):
    control = Recorded(
        r1=["run study\n" + lines(round_finished())], r2=["other\n"], r3=["run study\n" + lines(MEASURED, FINISHED)]
    )
    control.statuses[1] = ["finished:failed"]
    control.actions |= {2: "resume:another", 3: "resume:study"}
    assert follow(control, tiny_job) == FINISHED


def test_the_server_may_be_away_before_it_goes_on(tiny_job):
    control = Recorded(r1=["run study\n" + lines(round_finished())], r2=["run study\n" + lines(FINISHED)])
    control.statuses[1] = ["finished:failed"] * 2 + [JobError("can't be reached")] * 3 + ["finished:failed"]
    control.actions[2] = "resume:study"
    assert follow(control, tiny_job) == FINISHED


def test_a_lost_run_that_nobody_goes_on_with_is_an_error_after_a_while(tiny_job, monkeypatch):
    monkeypatch.setattr(watch, "PATIENCE_S", 0.05)
    control = Recorded(r1=["run study\n" + lines(round_finished())])
    control.statuses[1] = ["finished:failed"]
    with pytest.raises(JobError, match="run 1 finished:failed"):
        follow(control, tiny_job)
