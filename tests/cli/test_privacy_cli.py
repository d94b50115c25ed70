"""`fedplat privacy solve`: the contract for scripts, the words for people, and bad input."""

import json
import time

import pytest
from typer.testing import CliRunner

from fedplat.cli.privacy import app
from fedplat.errors import UsageError
from privacy import events
from privacy.accounting import epsilon

SCHEDULE = ["--sample-rate", "0.01", "--steps", "200", "--delta", "1e-5"]


def solve(*arguments: str):
    result = CliRunner().invoke(app, ["solve", *arguments], env={"COLUMNS": "200"})
    if result.exception is not None and not isinstance(result.exception, SystemExit | UsageError):
        raise result.exception
    return result


def test_epsilon_of_a_schedule_as_json():
    result = solve(*SCHEDULE, "--noise", "1.1", "--json")
    found = json.loads(result.stdout.splitlines()[-1])
    assert found["epsilon"].keys() == {"pld", "rdp", "prv"}
    assert found["claimed"] == found["epsilon"]["pld"] == epsilon(events.dp_sgd(0.01, 1.1, 200), 1e-5)
    assert (found["relation"], found["delta"], found["steps"], found["witnesses"]) == ("add-remove", 1e-5, 200, 3)
    assert found["epsilon_without_amplification"] > found["claimed"]


def test_noise_for_a_target_as_json():
    found = json.loads(solve(*SCHEDULE, "--epsilon", "1", "--json").stdout.splitlines()[-1])
    assert 0.99 < found["claimed"] <= 1
    assert found["claimed"] == epsilon(events.dp_sgd(0.01, found["noise_multiplier"], 200), 1e-5)


def test_rounds_multiply_steps():
    once = json.loads(solve(*SCHEDULE, "--noise", "1.1", "--json").stdout)
    rounds = ["--sample-rate", "0.01", "--steps", "20", "--rounds", "10", "--delta", "1e-5"]
    assert json.loads(solve(*rounds, "--noise", "1.1", "--json").stdout) == once


def test_the_accountant_and_the_relation_can_be_chosen():
    found = json.loads(solve(*SCHEDULE, "--noise", "1.1", "--accountant", "rdp", "--json").stdout)
    assert (found["claimed"], found["claimed_by"]) == (found["epsilon"]["rdp"], "rdp")
    replaced = json.loads(solve(*SCHEDULE, "--noise", "1.1", "--relation", "replace-one", "--json").stdout)
    assert (replaced["epsilon"]["rdp"], replaced["epsilon"]["prv"], replaced["witnesses"]) == (None, None, 1)
    assert replaced["claimed"] > found["epsilon"]["pld"]


def test_words_for_people(tmp_path):
    picture = tmp_path / "what-if.png"
    result = solve(*SCHEDULE, "--noise", "2", "--what-if", "--plot", str(picture))
    assert result.exit_code == 0
    for words in ("claimed", "odds", "e^ε", "shuffled loader must not", "without sampling", "what if", "400 steps"):
        assert words in result.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_what_if_as_json():
    found = json.loads(solve(*SCHEDULE, "--noise", "2", "--what-if", "--json").stdout)
    mine = [row for row in found["what_if"] if (row["noise_multiplier"], row["steps"]) == (2.0, 200)]
    assert mine[0]["epsilon"] == pytest.approx(found["claimed"], abs=1e-3)


def test_help_has_examples():
    assert "fedplat privacy solve --sample-rate 0.01" in solve("--help").stdout


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"--sample-rate": "1.5"}, "--sample-rate must be above 0"),
        ({"--sample-rate": "0"}, "--sample-rate must be above 0"),
        ({"--sample-rate": "nan"}, "--sample-rate must be above 0"),
        ({"--steps": "0"}, "must be at least 1"),
        ({"--rounds": "0"}, "must be at least 1"),
        ({"--delta": "1"}, "--delta must be between"),
        ({"--delta": "0"}, "--delta must be between"),
        ({"--noise": "0"}, "not private"),
        ({"--noise": "-1"}, "not private"),
        ({"--noise": "inf"}, "not private"),
        ({"--noise": "1e300"}, "--noise must be between 0.001 and 1e+09"),
        ({"--noise": "1e-30"}, "--noise must be between 0.001 and 1e+09"),
        ({"--steps": "1000000000000"}, "is more than 1,000,000,000: plan for fewer"),
        ({"--steps": "100000", "--rounds": "100000"}, "is more than 1,000,000,000: plan for fewer"),
        ({"--steps": "9" * 400}, "is more than 1,000,000,000: plan for fewer"),
        ({"--epsilon": "1"}, "not both"),
        ({"--noise": None}, "not neither"),
        ({"--noise": None, "--epsilon": "0"}, "--epsilon must be"),
        ({"--noise": None, "--epsilon": "-3"}, "--epsilon must be"),
        ({"--relation": "replace"}, "did you mean 'replace-one'"),
        ({"--accountant": "gdp"}, "unknown accountant"),
        ({"--accountant": "rdp", "--relation": "replace-one"}, "no ε by rdp"),
        ({"--plot": "picture.pdf"}, "ends in .png"),
    ],
)
def test_bad_input_is_refused_before_anything_is_computed(changed, message):
    options = {"--sample-rate": "0.01", "--steps": "10", "--delta": "1e-5", "--noise": "1.0"} | changed
    result = solve(*(part for key, value in options.items() if value is not None for part in (key, value)))
    assert isinstance(result.exception, UsageError)
    assert result.exception.exit_code == 2
    assert message in str(result.exception)


@pytest.mark.parametrize("missing", ["--sample-rate", "--steps", "--delta"])
def test_required_options(missing):
    arguments = list(SCHEDULE)
    position = arguments.index(missing)
    del arguments[position : position + 2]
    assert solve(*arguments, "--noise", "1").exit_code == 2


@pytest.mark.parametrize(
    ("rate", "noise", "steps"),
    [
        ("1e-12", "1", 10**9),
        ("1e-6", "1", 10**8),
        ("1", "1e9", 10**9),
        ("0.001", "100", 10**9),
        ("0.5", "0.001", 10**9),
    ],
)
def test_no_schedule_within_bounds_keeps_a_person_waiting(rate, noise, steps):
    """PLD once raised a thousand to the power of a billion, in whole numbers, to see whether that is large."""
    started = time.monotonic()
    found = json.loads(
        solve("--sample-rate", rate, "--noise", noise, "--steps", str(steps), "--delta", "1e-5", "--json").stdout
    )
    assert found["claimed"] >= 0 and time.monotonic() - started < 30
