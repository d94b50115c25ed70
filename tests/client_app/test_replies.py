"""The durable record: one identity has one request and one reply, whatever is killed when."""

import itertools
import multiprocessing
import os
import random
import signal
import sqlite3
import time
from pathlib import Path

import numpy as np
import pytest
from flwr.app import RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st

from client_app.replies import KEPT_ROUNDS, ReplyStore
from fedplat import wire
from fedplat.errors import UsageError
from fedplat.wire import Identity
from tests.fedplat.test_records import records

JOB = "ab" * 32
LAWS = settings(max_examples=30, deadline=None)
KILLS = 25


def who(number: int = 1, attempt: int = 1, job: str = JOB) -> Identity:
    return Identity(job, number, attempt, "client-0")


def reply_of(number: int, seed: int = 0) -> RecordDict:
    arrays = {"w": np.random.default_rng([number, seed]).normal(size=(4, 3)).astype(np.float32), "n": np.array(number)}
    return wire.reply_content(who(number), 10, {"loss": 0.1 + number}, wire.encode_arrays(arrays))


def bits(reply: RecordDict) -> bytes:
    """Everything that would travel."""
    return reply.deflate() + b"".join(record.deflate() for record in reply.values()) + b"".join(
        array.data for array in reply[wire.ARRAYS].values()
    )  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "replies"


def serve(store: ReplyStore, identity: Identity, digest: str, seed: int = 0) -> RecordDict:
    """As the agent does: note, compute, write, settle."""
    known = store.begin(identity, "train", digest) or store.kept(identity, "train")
    if known is None:
        known = reply_of(identity.round, seed)
        store.write(identity, "train", known)
    store.settle(identity, "train")
    return known


def test_the_same_request_gets_the_same_reply_bit_for_bit_also_after_reopening(folder):
    store = ReplyStore(folder)
    first = bits(serve(store, who(), "d"))
    assert bits(store.begin(who(), "train", "d")) == first
    store.close()
    for _ in range(2):
        again = ReplyStore(folder)
        assert bits(again.begin(who(), "train", "d")) == first
        assert bits(serve(again, who(), "d", seed=1)) == first
        again.close()


def test_an_array_in_another_memory_order_is_the_same_reply(folder):
    store, transposed = ReplyStore(folder), np.arange(6, dtype=np.float32).reshape(2, 3).T
    sent = wire.reply_content(who(), 1, {"loss": float("nan")}, wire.encode_arrays({"w": transposed}))
    store.begin(who(), "train", "d")
    store.write(who(), "train", sent)
    store.settle(who(), "train")
    again = store.begin(who(), "train", "d")
    assert again is not None
    assert np.array_equal(again[wire.ARRAYS]["w"].numpy(), transposed)
    assert bits(again) == bits(sent)


@LAWS
@given(records)
def test_whatever_a_site_answers_is_read_back_as_it_was(tmp_path_factory, reply):
    folder = tmp_path_factory.mktemp("law")
    store = ReplyStore(folder)
    assert store.begin(who(), "evaluate", "d") is None
    store.write(who(), "evaluate", reply)
    store.settle(who(), "evaluate")
    store.close()
    again = ReplyStore(folder)
    assert again.begin(who(), "evaluate", "d") == reply
    again.close()


@pytest.mark.parametrize("step", ["begun", "written", "settled"])
def test_another_request_under_the_same_identity_is_refused_from_the_first_moment_on(step, folder):
    store = ReplyStore(folder)
    store.begin(who(), "train", "d")
    if step != "begun":
        store.write(who(), "train", reply_of(1))
    if step == "settled":
        store.settle(who(), "train")
    for reopened in (store, ReplyStore(folder)):
        with pytest.raises(UsageError, match="one identity has one request"):
            reopened.begin(who(), "train", "e")
        reopened.begin(who(), "train", "d")


def test_attempt_kind_round_and_job_are_identities_of_their_own(folder):
    store = ReplyStore(folder)
    serve(store, who(), "d")
    for identity, kind in (
        (who(attempt=2), "train"),
        (who(), "evaluate"),
        (who(2), "train"),
        (who(job="cd" * 32), "train"),
    ):
        assert store.begin(identity, kind, "e") is None
        assert store.kept(identity, kind) is None


@pytest.mark.parametrize("crash_after", ["begin", "write", "settle"])
def test_after_a_crash_at_any_step_the_same_request_goes_on(crash_after, folder):
    store, reply = ReplyStore(folder), reply_of(1)
    assert store.begin(who(), "train", "d") is None
    if crash_after != "begin":
        store.write(who(), "train", reply)
    if crash_after == "settle":
        store.settle(who(), "train")
    store.close()
    again = ReplyStore(folder)
    known = again.begin(who(), "train", "d")
    assert (known is not None) == (crash_after == "settle")
    kept = again.kept(who(), "train")
    assert (kept is not None) == (crash_after != "begin")
    answer = bits(serve(again, who(), "d", seed=7))
    assert (answer == bits(reply)) == (crash_after != "begin")
    again.close()


def test_a_reply_that_is_written_is_never_replaced(folder):
    store = ReplyStore(folder)
    store.begin(who(), "train", "d")
    store.write(who(), "train", reply_of(1))
    store.write(who(), "train", reply_of(1, seed=1))
    assert bits(store.kept(who(), "train")) == bits(reply_of(1))


def test_a_directory_that_a_crash_left_half_written_is_no_reply(folder):
    store = ReplyStore(folder)
    store.begin(who(), "train", "d")
    partial = folder / JOB[:32] / ".000001-1-train.part"
    partial.mkdir(parents=True)
    (partial / "layout.json").write_text("{")
    assert store.kept(who(), "train") is None
    assert bits(serve(store, who(), "d")) == bits(reply_of(1))


def test_old_rounds_are_forgotten_and_their_identity_is_still_taken(folder):
    store = ReplyStore(folder)
    for number in range(1, 8):
        serve(store, who(number), f"d{number}")
    kept = [number for number in range(1, 8) if store.kept(who(number), "train") is not None]
    assert kept == list(range(8 - KEPT_ROUNDS, 8))
    for number in range(1, 8):
        with pytest.raises(UsageError, match="one identity has one request"):
            store.begin(who(number), "train", "e")
        if number not in kept:
            with pytest.raises(UsageError, match="no longer kept"):
                store.begin(who(number), "train", f"d{number}")


@pytest.mark.parametrize("last", [9, 999_998, 999_999, 1_000_000])
def test_the_newest_round_is_kept_however_many_there_were(last, folder):
    store = ReplyStore(folder)
    for number in (last - 3, last - 2, last):
        serve(store, who(number), "d")
    kept = [number for number in (last - 3, last - 2, last) if store.kept(who(number), "train") is not None]
    assert kept == [last - 2, last]


def test_one_jobs_rounds_do_not_push_out_anothers(folder):
    store, other = ReplyStore(folder), "cd" * 32
    serve(store, who(1, job=other), "d")
    for number in range(1, 8):
        serve(store, who(number), "d")
    assert store.begin(who(1, job=other), "train", "d") is not None


@LAWS
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 2), st.sampled_from(["train", "evaluate"])), max_size=12))
def test_count_is_how_many_identities_were_asked_for(tmp_path_factory, asked):
    folder = tmp_path_factory.mktemp("count")
    store = ReplyStore(folder)
    for number, attempt, kind in asked:
        store.begin(who(number, attempt), kind, "d")
    for kind in ("train", "evaluate"):
        expected = len({(n, a) for n, a, k in asked if k == kind})
        assert store.count(JOB, kind) == expected
        assert store.count("cd" * 32, kind) == 0
    store.close()


def test_a_damaged_reply_is_refused_in_words(folder):
    store = ReplyStore(folder)
    serve(store, who(), "d")
    (folder / JOB[:32] / "000001-1-train" / "arrays.safetensors").write_bytes(b"junk")
    with pytest.raises(UsageError, match="no longer kept"):
        store.begin(who(), "train", "d")


def test_only_the_owner_reads_what_was_released(folder):
    store = ReplyStore(folder)
    serve(store, who(), "d")
    for path in (folder, folder / JOB[:32]):
        assert path.stat().st_mode & 0o077 == 0
    store.close()


def test_requests_are_synced_before_anything_is_computed(folder):
    store = ReplyStore(folder)
    assert store._database.execute("PRAGMA synchronous").fetchone() == (2,)
    store.begin(who(), "train", "d")
    seen = sqlite3.connect(folder / "requests.sqlite").execute("SELECT digest, answered FROM requests").fetchall()
    assert seen == [("d", None)]


# --- killed at random moments -----------------------------------------------------------------------


def answer_for_ever(folder: Path, report: Path, seed: int) -> None:
    """Serve one round after the other from the first unanswered one; report the reply's bytes once they may leave."""
    store = ReplyStore(folder)
    for number in itertools.count(len(list(report.glob("*-*"))) or 1):
        known = serve(store, who(number), f"d{number}", seed)
        descriptor = os.open(report / f"{number}-{seed}", os.O_WRONLY | os.O_CREAT, 0o600)
        os.write(descriptor, bits(known))
        os.close(descriptor)


def test_killed_at_random_moments_no_identity_ever_has_two_replies(folder, tmp_path):
    rng, report = random.Random(5), tmp_path / "report"
    report.mkdir()
    ReplyStore(folder).close()
    for kill in range(KILLS):
        child = multiprocessing.get_context("fork").Process(target=answer_for_ever, args=(folder, report, kill))
        child.start()
        deadline = time.monotonic() + 60
        while not list(report.glob(f"*-{kill}")):
            assert child.is_alive() and time.monotonic() < deadline
            time.sleep(0.002)
        time.sleep(rng.uniform(0, 0.03))
        child.kill()
        child.join()
        assert child.exitcode == -signal.SIGKILL
        left: dict[int, set[bytes]] = {}
        for path in report.iterdir():
            content = path.read_bytes()
            if content:  # else killed while it reported
                left.setdefault(int(path.name.split("-")[0]), set()).add(content)
        assert all(len(replies) == 1 for replies in left.values())
        store = ReplyStore(folder)
        newest = max(left)
        assert {bits(store.begin(who(newest), "train", f"d{newest}"))} == left[newest]
        store.close()
