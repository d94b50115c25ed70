"""What a site keeps does not grow for ever, and what is in use does not go."""

import os
import time
from pathlib import Path

import pytest
from flwr.app import ConfigRecord, RecordDict

from client_app import keeping
from client_app.replies import ReplyStore
from client_app.site_memory import SiteMemory
from fedplat.errors import UsageError
from tests.client_app.test_replies import bits, reply_of, serve, who
from tests.client_app.test_site_memory import KEEPING, OTHER

OLD, NEW = "cd" * 32, "ef" * 32


def age(path: Path, days: float) -> None:
    then = time.time() - days * keeping.DAY_S
    os.utime(path, (then, then))


def test_replies_of_a_job_that_nobody_asks_about_go_after_a_month_but_stay_given(tmp_path):
    store = ReplyStore(tmp_path)
    for job in (OLD, NEW):
        serve(store, who(1, job=job), "d")
    age(tmp_path / OLD[:32], 31)
    age(tmp_path / NEW[:32], 29)
    store.close()
    store = ReplyStore(tmp_path)
    assert store.begin(who(1, job=NEW), "train", "d") is not None
    assert not (tmp_path / OLD[:32]).exists() and (tmp_path / NEW[:32]).exists()
    with pytest.raises(UsageError, match="no longer kept"):
        store.begin(who(1, job=OLD), "train", "d")
    with pytest.raises(UsageError, match="one identity has one request"):
        store.begin(who(1, job=OLD), "train", "another")
    assert store.count(OLD, "train") == 1
    store.close()


def test_a_job_that_is_asked_about_keeps_its_replies(tmp_path):
    store = ReplyStore(tmp_path)
    reply = serve(store, who(1, job=OLD), "d")
    for _ in range(3):
        age(tmp_path / OLD[:32], 29)
        again = store.begin(who(1, job=OLD), "train", "d")
        assert again is not None and bits(again) == bits(reply) == bits(reply_of(1))
        store.close()
        store = ReplyStore(tmp_path)
    store.close()


def test_an_agent_that_runs_for_months_looks_every_day(tmp_path, monkeypatch):
    store = ReplyStore(tmp_path)
    serve(store, who(1, job=OLD), "d")
    now = time.time() + 40 * keeping.DAY_S
    monkeypatch.setattr(keeping.time, "time", lambda: now)
    store.begin(who(1, job=NEW), "train", "d")
    assert not (tmp_path / OLD[:32]).exists() and (tmp_path / "requests.sqlite").exists()
    store.close()


def test_what_is_remembered_of_a_job_goes_with_it(tmp_path):
    state = RecordDict({"x": ConfigRecord({"a": 1})})
    for job in (KEEPING, OTHER):
        SiteMemory(tmp_path).save(job, state)
    old, new = (tmp_path / f"{job.digest[:32]}.safetensors" for job in (KEEPING, OTHER))
    age(old, 31)
    age(new, 29)
    assert SiteMemory(tmp_path).recall(OTHER) == state
    assert not old.exists() and new.stat().st_mtime > time.time() - 60
