"""Bad input: what is typed → what a person reads → nothing started, nothing lost."""

from pathlib import Path

import pytest

from tests.cli.conftest import FAST

SET = "--set"
CASES = {
    "missing job file": (
        ["simulate", "nowhere.toml"],
        "nowhere.toml: no such job file. Write one with: fedplat job init",
    ),
    "malformed TOML": (["simulate", "broken.toml"], "broken.toml: not valid TOML"),
    "not text": (["simulate", "binary.toml"], "binary.toml: can't be read"),
    "unknown key": (["simulate", SET, "cohort.fractoin=0.5"], "did you mean 'cohort.fraction'?"),
    "unknown section": (["simulate", SET, "chort.fraction=0.5"], "unknown key 'chort'"),
    "out of range": (["simulate", SET, "cohort.fraction=2"], "cohort.fraction must be ≤ 1.0 (got 2)"),
    "wrong type": (["simulate", SET, "job.rounds=many"], "job.rounds: input should be a valid integer"),
    "unknown task": (
        ["simulate", SET, "task.name=digit"],
        "unknown task 'digit' (did you mean 'digits'?). Valid: cancer",
    ),
    "unknown strategy": (["simulate", SET, "server.strategy=FedAvgg"], "did you mean 'FedAvg'?). Valid: Bulyan"),
    "unknown partitioner": (["simulate", SET, "data.partition.kind=diri"], "unknown partitioner 'diri'"),
    "wrong strategy argument": (["simulate", SET, "server.args.beta=1"], "server.args: unknown argument 'beta'"),
    "wrong task argument": (
        ["simulate", SET, "task.args.hiden=1"],
        "task.args: unknown argument 'hiden' (did you mean 'hidden'?)",
    ),
    "more clients than examples": (["simulate", SET, "cohort.clients=2000"], "only 1438 training examples"),
    "an empty client": (
        ["simulate", SET, "data.partition={kind='hash'}", SET, "cohort.clients=1000"],
        "without examples (client-",
    ),
    "data file missing": (["simulate", SET, "task.name=mnist"], "fedplat data download mnist"),
    "init_from missing": (["simulate", SET, "task.init_from=none.safetensors"], "none.safetensors can't be read"),
    "freeze matches nothing": (["simulate", SET, "task.freeze=['conv*']"], "'conv*' matches no parameter"),
    "task is no task": (["simulate", SET, "task.name=fedplat.job:Job"], "missing model(), data(), loss(), metrics()"),
    "task module missing": (["simulate", SET, "task.name=no.such:Task"], "can't import no.such"),
    "bad --set": (["simulate", SET, "rounds=3"], "write section.key=value"),
    "run directory exists": (["simulate", *FAST, "--out", "taken"], "taken exists already"),
    "resume nothing": (["resume", "nothing"], "no such run"),
    "resume a foreign folder": (["resume", "./taken"], "not a fedplat run directory"),
    "show nothing": (["runs", "show", "nothing"], "no such run"),
    "job check reports it too": (["job", "check", SET, "cohort.clients=2000"], "only 1438 training examples"),
    "job init over a file": (["job", "init", "broken.toml"], "broken.toml exists already"),
    "download of what needs none": (["data", "download", "digits"], "nothing to download"),
}


@pytest.mark.parametrize(("arguments", "message"), CASES.values(), ids=CASES.keys())
def test_bad_input_is_explained_and_nothing_is_started(arguments, message, fedplat):
    Path("broken.toml").write_text("[job\nrounds = 3")
    Path("binary.toml").write_bytes(b"\xff\xfe\x00")
    Path("taken").mkdir()
    result = fedplat(*arguments)
    assert result.code == 2
    assert result.err.startswith("error: ") and message in result.err
    assert "Traceback" not in result.err
    assert not Path("runs").exists() and list(Path("taken").iterdir()) == []


def test_unknown_option_is_a_usage_error(fedplat):
    assert fedplat("simulate", "--rounds", "3").code == 2


def test_an_explicit_file_that_lies_is_named(fedplat):
    Path("lists.json").write_text("[[0, 1], [1, 2]]")
    result = fedplat("simulate", SET, "data.partition={kind='explicit',file='lists.json'}", SET, "cohort.clients=2")
    assert result.code == 2 and "lists.json: every example from 0 to 1437" in result.err


def test_a_job_that_fails_while_running_exits_with_one_and_can_be_resumed(fedplat):
    # An absurdly small norm limit refuses every update.
    result = fedplat("simulate", *FAST, SET, "server.max_update_norm=1e-12", "--out", "failing")
    assert result.code == 1
    assert (
        "0 accepted updates, cohort.min_replies = 1 (0 failed, 0 late, 2 refused; most often: update norm" in result.err
    )
    assert "fedplat resume failing" in result.err
    assert Path("failing/events.jsonl").exists()


def test_a_finished_run_is_not_resumed(fedplat):
    fedplat("simulate", *FAST, "--out", "done")
    result = fedplat("resume", "done")
    assert result.code == 2 and "already finished after round 3" in result.err


def test_a_corrupted_event_log_is_named(fedplat):
    fedplat("simulate", *FAST, "--out", "hurt")
    log = Path("hurt/events.jsonl")
    log.write_text(log.read_text().replace('"round_started"', '"round_strated"', 1))
    result = fedplat("runs", "show", "./hurt")
    assert result.code == 2 and "line 3 is not an event" in result.err
