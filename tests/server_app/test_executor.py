"""What a server demands of a signed job, and how it remembers the one that it drives."""

import stat
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedplat.errors import UsageError
from fedplat.job import Job
from server_app.executor import RUN_ID, Current, require_drivable

SITES = ["north", "south", "west"]


@pytest.fixture
def job_with(tiny_job):
    def make(**changes: object) -> Job:
        cohort = {"cohort__clients": 2, "cohort__fraction": 1.0, "cohort__sites": ["south", "north"]}
        return tiny_job(**(cohort | changes))

    return make


def test_an_honest_job_is_driven(job_with):
    require_drivable(job_with(), (), SITES)


def test_a_strategy_of_somebodys_own_needs_the_servers_permission(job_with):
    job = job_with(server__strategy="theirs.module:Strategy")
    with pytest.raises(UsageError, match="not in the strategies that this server allows"):
        require_drivable(job, (), SITES)
    with pytest.raises(UsageError, match="not in the strategies"):
        require_drivable(job, ("theirs.module:Other", "theirs.module"), SITES)
    require_drivable(job, ("theirs.module:Strategy",), SITES)


REFUSED = {
    "no sites": ({"cohort__sites": []}, "cohort.sites is empty: submit the job with `fedplat submit`"),
    "an unknown site": (
        {"cohort__sites": ["north", "east"]},
        "no site 'east' in the roster. It has north, south, west",
    ),
    "rounds without a checkpoint": ({"server__checkpoint_every": 2}, "checkpoint_every must be 1 on a federation"),
}


@pytest.mark.parametrize(("changes", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_a_federation_can_not_run_is_explained(changes, message, job_with):
    with pytest.raises(UsageError) as refused:
        require_drivable(job_with(**changes), (), SITES)
    assert message in str(refused.value)


# --- the run that is being driven ------------------------------------------------------------------------

texts = st.text(max_size=30)
numbers = st.integers(-(2**63), 2**64 - 1)
currents = st.builds(Current, texts, numbers, numbers, numbers, texts, texts, texts)


@given(currents)
@settings(max_examples=60, deadline=None)
def test_what_is_saved_is_loaded(tmp_path_factory, current):
    path = tmp_path_factory.getbasetemp() / "run.json"
    current.save(path)
    assert Current.load(path) == current
    assert stat.S_IMODE(path.stat().st_mode) == 0o600  # the token is a secret


def test_a_later_save_replaces_the_earlier_one(tmp_path):
    first = Current("token", 1, 2, 3, "{}", "")
    first.save(tmp_path / "run.json")
    second = Current(**asdict(first) | {"directory": "study-1"})
    second.save(tmp_path / "run.json")
    assert Current.load(tmp_path / "run.json") == second
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


@pytest.mark.parametrize("content", [None, b"", b"junk", b"[]", b"{}", b"null", b'{"token": "x"}', b"\xff\xfe", b"1"])
def test_a_file_that_is_missing_or_damaged_is_no_run(content, tmp_path):
    path: Path = tmp_path / "run.json"
    if content is not None:
        path.write_bytes(content)
    assert Current.load(path) is None


def test_fields_of_another_version_are_no_run(tmp_path):
    current = Current("token", 1, 2, 3, "{}", "")
    current.save(tmp_path / "run.json")
    text = (tmp_path / "run.json").read_text()
    (tmp_path / "run.json").write_text(text[:-1] + ', "more": 1}')
    assert Current.load(tmp_path / "run.json") is None


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../x", "a/b", "/etc", ".hidden", "-x", "a\n", "a\0b", "é", "a b", "x" * 300, "a/../../b"]
)
def test_no_name_leads_out_of_the_runs_folder(name):
    assert not RUN_ID.match(name)
    assert RUN_ID.match("study-20260101-101010-ab12")
