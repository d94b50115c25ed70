"""What a site remembers of a job is on its own disk, as it was."""

import stat

import numpy as np
import pytest
from flwr.app import ConfigRecord, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st

from client_app import memory as memories
from client_app.handler import Handler
from client_app.site_memory import SiteMemory
from fedplat.errors import JobError
from fedplat.job import Job
from tests.client_app.test_memory import PERSONAL, SCAFFOLD, bits, job_of, request, who
from tests.fedplat.test_records import arrays, records

KEEPING, OTHER = job_of(**SCAFFOLD), job_of(**PERSONAL)
PLAIN = job_of(task={"name": "cancer", "args": {"hidden": 4}})
LAWS = settings(max_examples=40, deadline=None)


@LAWS
@given(records)
def test_what_is_saved_is_recalled(tmp_path_factory, state):
    folder = tmp_path_factory.mktemp("memory")
    SiteMemory(folder).save(KEEPING, state)
    assert SiteMemory(folder).recall(KEEPING) == state


@LAWS
@given(st.lists(arrays, min_size=1, max_size=3))
def test_client_states_of_several_rounds_survive(tmp_path_factory, rounds):
    folder = tmp_path_factory.mktemp("states")
    state = RecordDict()
    for number, kept in enumerate(rounds, start=1):
        memories.keep(state, number, kept)
        SiteMemory(folder).save(KEEPING, state)
        again = SiteMemory(folder).recall(KEEPING)
        assert again == state
        for asked in (number, number + 1):
            before, after = memories.recall(state, asked), memories.recall(again, asked)
            assert before.keys() == after.keys()
            assert all(before[n].tobytes() == after[n].tobytes() for n in before)
            assert all((before[n].dtype, before[n].shape) == (after[n].dtype, after[n].shape) for n in before)


@pytest.mark.parametrize("sections", [PERSONAL, SCAFFOLD], ids=["personal", "scaffold"])
def test_rounds_over_a_disk_equal_rounds_in_memory(sections, tmp_path):
    job = job_of(**sections)
    in_memory = RecordDict()
    for number in (1, 2, 3):
        expected = Handler(job).train(request(job, number), who(job, number), in_memory)
        remembered = SiteMemory(tmp_path).recall(job)
        reply = Handler(job).train(request(job, number), who(job, number), remembered)
        SiteMemory(tmp_path).save(job, remembered)
        assert bits(reply) == bits(expected)


def test_jobs_do_not_share_a_memory(tmp_path):
    memory, state = SiteMemory(tmp_path), RecordDict({"x": ConfigRecord({"n": 1})})
    memory.save(KEEPING, state)
    assert memory.recall(OTHER) == RecordDict()
    memory.save(OTHER, RecordDict({"x": ConfigRecord({"n": 2})}))
    assert memory.recall(KEEPING) == state


def test_a_job_without_state_leaves_none(tmp_path):
    SiteMemory(tmp_path / "m").save(PLAIN, RecordDict({"x": ConfigRecord({"n": 1})}))
    assert list((tmp_path / "m").iterdir()) == []
    assert SiteMemory(tmp_path / "m").recall(PLAIN) == RecordDict()


def file_of(memory_folder, job: Job):
    (path,) = memory_folder.iterdir()
    assert path.name.startswith(job.digest[:32])
    return path


@pytest.mark.parametrize("content", [b"", b"junk", b"\xff" * 100, b"\x02\0\0\0\0\0\0\0{}"])
def test_a_damaged_memory_is_an_error_and_not_an_empty_one(content, tmp_path):
    """Training from nothing would look like training."""
    memory = SiteMemory(tmp_path / "m")
    memory.save(KEEPING, RecordDict({"x": ConfigRecord({"n": 1})}))
    file_of(tmp_path / "m", KEEPING).write_bytes(content)
    with pytest.raises(JobError, match="what this site remembers of the job can't be read"):
        memory.recall(KEEPING)


def test_only_the_owner_reads_what_a_site_remembers(tmp_path):
    memory = SiteMemory(tmp_path / "m")
    state = RecordDict()
    memories.keep(state, 1, {"head": np.zeros(3)})
    memory.save(KEEPING, state)
    assert stat.S_IMODE((tmp_path / "m").stat().st_mode) == 0o700
    assert stat.S_IMODE(file_of(tmp_path / "m", KEEPING).stat().st_mode) == 0o600
