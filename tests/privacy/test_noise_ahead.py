"""Noise made ahead: the law of the normals, none used twice, and a process that comes and goes unnoticed.

Statistical tests fail by chance with a probability of at most 1e-6 each.
"""

import copy
import fcntl
import gc
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from privacy.gaussian import BLOCK, add_gaussian, standard_normals
from privacy.noise_ahead import NoiseAhead, _Ring
from privacy.randomness import insecure_stream, secure_stream
from tests.privacy.test_randomness import in_child

FALSE_ALARM = 1e-7
PATIENCE_S = 30.0
ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(not Path("/proc/self").exists(), reason="looks at processes through /proc")


@pytest.fixture
def ahead() -> Iterator[NoiseAhead]:
    with NoiseAhead(secure_stream(), 3 * BLOCK) as made:
        yield made


def take(ahead: NoiseAhead, n: int) -> np.ndarray:
    out = np.empty(n)
    ahead.normals_into(out)
    return out


def ring_of(ahead: NoiseAhead) -> _Ring:
    assert ahead._ring is not None
    return ahead._ring


def wait_until(true: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline, f"in vain: waited until {what}"
        time.sleep(0.005)


def runs(process: int) -> bool:
    """Neither gone nor a zombie."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def is_child_of_ours(process: int) -> bool:
    """Running, or a zombie that nobody has waited for."""
    try:
        os.waitpid(process, os.WNOHANG)
    except ChildProcessError:
        return False
    return True


def filled(ahead: NoiseAhead) -> int:
    """Slots that are filled and not yet taken: unread bytes in the pipe."""
    answer = fcntl.ioctl(ring_of(ahead)._ready, 0x541B, bytes(4))  # FIONREAD
    return int.from_bytes(answer, sys.byteorder)


def wait_for_slots(ahead: NoiseAhead, slots: int) -> None:
    wait_until(lambda: filled(ahead) == slots, f"{slots} slots are filled")


def start_script(body: str) -> "subprocess.Popen[str]":
    """A process of its own (and a group of its own, as in a terminal) that uses noise made ahead."""
    script = "from tests.privacy.test_noise_ahead import *\n" + textwrap.dedent(body)
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    )


def number_from(process: "subprocess.Popen[str]") -> int:
    assert process.stdout is not None
    return int(process.stdout.readline())


def assert_disjoint(*draws: np.ndarray) -> None:
    """Four chance meetings among less than 2^43 pairs of 2^50 values have a probability below 1e-9."""
    for first, second in combinations(draws, 2):
        assert np.isin(second, first).sum() < 4


def test_normals_made_ahead_follow_the_law_and_none_is_used_twice(ahead):
    draws = []
    for n in (1, 300_000, 7, 200_000, BLOCK, 2 * BLOCK + 5, 400_000):
        wait_until(lambda: filled(ahead) > 0, "a slot is filled")
        draws.append(take(ahead, n))
    everything = np.concatenate(draws)
    assert ring_of(ahead)._taken >= 4  # most of it came from the other process
    assert stats.kstest(everything, "norm").pvalue > FALSE_ALARM
    assert np.unique(everything).size > everything.size - 5


def test_two_processes_make_different_normals(ahead):
    with NoiseAhead(secure_stream(), 3 * BLOCK) as other:
        draws = []
        for source in (ahead, other):
            wait_for_slots(source, 3)
            draws.append(take(source, 3 * BLOCK))
            assert ring_of(source)._taken == 3
    assert_disjoint(*draws)


def test_a_caller_that_is_too_fast_makes_its_own():
    stream = secure_stream()
    with NoiseAhead(stream, 1) as ahead:
        os.kill(ring_of(ahead).child, signal.SIGSTOP)  # nothing (more) will be ready
        draws = take(ahead, 6 * BLOCK)
        os.kill(ring_of(ahead).child, signal.SIGCONT)
        wait_for_slots(ahead, 2)
        later = take(ahead, 2 * BLOCK)
    assert stats.kstest(draws, "norm").pvalue > FALSE_ALARM
    assert_disjoint(draws, later, standard_normals(stream, BLOCK))


@pytest.mark.parametrize(("asked", "blocks"), [(1, 2), (2 * BLOCK, 2), (2 * BLOCK + 1, 3)])
def test_what_waits_is_bounded(asked, blocks):
    with NoiseAhead(secure_stream(), asked) as ahead:
        assert ring_of(ahead)._slots.size == blocks * BLOCK
        wait_for_slots(ahead, blocks)
        for n in (1, BLOCK - 1, 5, 2 * BLOCK, 4 * BLOCK):
            take(ahead, n)
            wait_for_slots(ahead, blocks - ring_of(ahead)._holds_slot)  # one may be begun


def test_a_piece_stays_as_it_is_until_the_next_is_asked_for(ahead):
    wait_for_slots(ahead, 3)
    pieces = ahead.pieces(2 * BLOCK)
    piece = next(pieces)
    before = piece.copy()
    time.sleep(0.02)  # time enough to fill it again, if it had been given back
    np.testing.assert_array_equal(piece, before)
    assert np.shares_memory(piece, ring_of(ahead)._slots)  # no copy
    next(pieces)
    wait_until(lambda: not np.array_equal(piece, before), "the slot is filled anew")


def test_overwriting_pieces_changes_no_other_normals(ahead):
    wait_for_slots(ahead, 3)
    for piece in ahead.pieces(3 * BLOCK + 10):
        piece[:] = np.nan
    wait_until(lambda: filled(ahead) > 0, "a slot is filled")
    assert np.isfinite(take(ahead, 2 * BLOCK)).all()


def test_two_loops_at_once_are_refused(ahead):
    wait_for_slots(ahead, 3)
    first = ahead.pieces(2 * BLOCK)
    next(first)
    with pytest.raises(RuntimeError, match="one loop at a time"):
        take(ahead, 1)
    first.close()
    assert take(ahead, 1).size == 1


def test_close_leaves_no_process_and_the_caller_goes_on():
    ahead = NoiseAhead(secure_stream(), 1)
    child = ring_of(ahead).child
    assert runs(child)
    ahead.close()
    ahead.close()
    assert not runs(child) and not is_child_of_ours(child)
    assert stats.kstest(take(ahead, BLOCK + 1), "norm").pvalue > FALSE_ALARM


def test_closing_in_the_middle_of_a_loop_keeps_what_was_handed_out(ahead):
    wait_for_slots(ahead, 3)
    pieces = ahead.pieces(2 * BLOCK)
    first = next(pieces)
    before = first.copy()
    ahead.close()
    assert sum(piece.size for piece in pieces) == BLOCK
    np.testing.assert_array_equal(first, before)


def test_dropping_it_leaves_no_process():
    ahead = NoiseAhead(secure_stream(), 1)
    child = ring_of(ahead).child
    del ahead
    gc.collect()
    assert not runs(child) and not is_child_of_ours(child)


def test_the_end_of_the_interpreter_leaves_no_process():
    parent = start_script("ahead = NoiseAhead(secure_stream(), 1); print(ring_of(ahead).child)")
    child = number_from(parent)
    assert parent.communicate() == ("", "") and parent.returncode == 0
    assert not runs(child)


@pytest.mark.parametrize("starter", ["start()", "t = threading.Thread(target=start); t.start(); t.join()"])
def test_a_killed_parent_takes_the_process_with_it(starter):
    """At once where the kernel does it (started by the main thread), else as soon as the child looks.

    A sibling holds copies of the parent's ends of the pipes, so that their end tells the child nothing.
    """
    parent = start_script(f"""
        def start():
            global ahead
            ahead = NoiseAhead(secure_stream(), 1)
        {starter}
        wait_for_slots(ahead, 2)
        sibling = os.fork()
        if sibling == 0:
            os.closerange(0, 3)
            time.sleep(600)
        print(ring_of(ahead).child, sibling, sep="\\n", flush=True)
        time.sleep(600)
    """)
    child, sibling = number_from(parent), number_from(parent)
    try:
        assert runs(child)
        parent.kill()
        parent.communicate()
        wait_until(lambda: not runs(child), "the child is gone")
        assert runs(sibling)
    finally:
        os.kill(sibling, signal.SIGKILL)


def test_ctrl_c_reaches_the_parent_only_and_prints_nothing():
    parent = start_script("""
        try:
            ahead = NoiseAhead(secure_stream(), 1)
            print(ring_of(ahead).child, flush=True)
            time.sleep(600)
        except KeyboardInterrupt:
            time.sleep(0.05)
            print(int(runs(ring_of(ahead).child)))
    """)
    child = number_from(parent)
    os.killpg(parent.pid, signal.SIGINT)
    assert parent.communicate() == ("1\n", "")
    assert not runs(child)


def test_handlers_of_the_parent_do_not_run_in_the_child(tmp_path):
    parent = start_script(f"""
        for number in (signal.SIGUSR1, signal.SIGTERM):
            signal.signal(number, lambda *_: Path({str(tmp_path / "ran")!r}).touch())
        ahead = NoiseAhead(secure_stream(), 1)
        wait_for_slots(ahead, 2)
        os.kill(ring_of(ahead).child, signal.SIGUSR1)
        take(ahead, 2 * BLOCK)
        wait_for_slots(ahead, 2)
        os.kill(ring_of(ahead).child, signal.SIGTERM)
        wait_until(lambda: not runs(ring_of(ahead).child), "the child is gone")
    """)
    assert parent.communicate() == ("", "")
    assert parent.returncode == 0 and not (tmp_path / "ran").exists()


def test_the_parents_signals_are_as_before(ahead):
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_it_outlives_the_thread_that_started_it():
    made: list[NoiseAhead] = []

    def start() -> None:
        made.append(NoiseAhead(secure_stream(), 1))
        wait_for_slots(made[0], 2)

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    with made[0] as ahead:
        time.sleep(0.02)  # the system's thread ends a little after Python's
        take(ahead, 2 * BLOCK)
        wait_for_slots(ahead, 2)  # it is alive and at work


def test_the_caller_goes_on_when_the_process_is_killed(ahead):
    wait_for_slots(ahead, 3)
    child = ring_of(ahead).child
    take(ahead, 10)
    os.kill(child, signal.SIGKILL)
    wait_until(lambda: not runs(child), "it is dead")
    draws = take(ahead, 5 * BLOCK)
    assert stats.kstest(draws, "norm").pvalue > FALSE_ALARM
    assert np.unique(draws).size > draws.size - 5
    assert not is_child_of_ours(child)  # noticed and waited for
    assert take(ahead, 10).size == 10


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_process_that_cannot_be_started_costs_only_time(monkeypatch):
    def refuse() -> int:
        raise BlockingIOError("no more processes")

    monkeypatch.setattr(os, "fork", refuse)
    before = open_files()
    with NoiseAhead(secure_stream(), 1) as ahead:
        assert take(ahead, 1000).size == 1000
        assert open_files() == before


def test_without_fork_the_caller_makes_all(monkeypatch):
    monkeypatch.delattr(os, "fork")
    with NoiseAhead(secure_stream(), 1) as ahead:
        assert ahead._ring is None and take(ahead, 1000).size == 1000


def test_a_forked_copy_never_sees_noise_made_for_its_parent(ahead):
    wait_for_slots(ahead, 3)
    take(ahead, 1000)
    pieces = ahead.pieces(2 * BLOCK)
    begun = next(pieces)[:1000].copy()  # the fork comes in the middle of a loop
    children = [np.frombuffer(in_child(lambda: next(pieces)[:4000].tobytes())) for _ in range(2)]
    pieces.close()
    children += [np.frombuffer(in_child(lambda: take(ahead, 4000).tobytes())) for _ in range(2)]
    own = take(ahead, 4 * BLOCK)
    assert [child.size for child in children] == [4000] * 4
    assert_disjoint(own, begun, *children)
    assert ring_of(ahead).is_ours() and runs(ring_of(ahead).child)


def test_a_forked_copy_does_not_end_its_parents_process(ahead):
    def close_copy() -> bytes:
        ahead.close()
        return take(ahead, 3).tobytes()

    assert len(in_child(close_copy)) == 24
    take(ahead, 4 * BLOCK)
    wait_until(lambda: filled(ahead) > 0, "a slot is filled")
    assert runs(ring_of(ahead).child)


def test_the_process_keeps_no_file_and_no_lock_of_its_parent(tmp_path):
    path = tmp_path / "lock"
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with NoiseAhead(secure_stream(), 1) as started_under_lock:
            wait_for_slots(started_under_lock, 2)
            file.close()
            with path.open("w") as again:
                fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)
            folder = Path(f"/proc/{ring_of(started_under_lock).child}/fd")
            targets = sorted(str(entry.readlink()).partition(":")[0] for entry in folder.iterdir())
            assert targets == ["/dev/null"] * 3 + ["pipe"] * 2


def test_insecure_noise_is_the_same_with_and_without_it():
    values = np.linspace(-1, 1, 400_000, dtype=np.float32)
    plain = add_gaussian(values, 0.1, insecure_stream("ahead"))
    with NoiseAhead(insecure_stream("ahead"), values.size) as ahead:
        assert ahead._ring is None
        assert add_gaussian(values, 0.1, ahead).tobytes() == plain.tobytes()


def test_noise_is_added_from_what_was_made_ahead(ahead):
    wait_for_slots(ahead, 3)
    values = np.linspace(-3, 3, 2 * BLOCK, dtype=np.float32)
    noise = (add_gaussian(values, 0.5, ahead).astype(np.float64) - values) / 0.5
    assert ring_of(ahead)._taken == 2
    assert stats.kstest(noise, "norm").pvalue > FALSE_ALARM


@pytest.mark.parametrize("duplicate", [pickle.dumps, copy.copy, copy.deepcopy])
def test_it_cannot_be_copied(ahead, duplicate):
    with pytest.raises(TypeError, match="used once"):
        duplicate(ahead)
