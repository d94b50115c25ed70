"""Standard normals made ahead by a process of its own, so that a training step only adds them.

A thread would share the interpreter's lock with training, and waits for it cost more than the normals. So a
forked child fills the slots of a ring in shared memory, from a keystream with a key of its own; two pipes carry one
byte per slot: "filled" to the parent, "free again" to the child. The pipes also order the memory: a slot is read after
its byte, and written after it was given back.

What is kept here:
- Each normal is handed out once. Only the process that started a child reads its ring: a forked copy makes its own.
  An interrupt between any two instructions can lose normals, never repeat them.
- The caller never waits. If nothing is ready, or the child hangs, was killed or could not be started, the caller makes
  its own normals: the child only costs or saves time.
- The child holds no file of its parent, runs none of its handlers or finalisers, and ends with it: at once
  where Linux tells it, within about a second elsewhere.

The price: pages that the parent rewrites after the fork are kept twice, until the child ends.
"""

import ctypes
import gc
import mmap
import os
import select
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from io import FileIO
from typing import NoReturn

import numpy as np

from privacy.gaussian import BLOCK, normal_pieces, normals_into
from privacy.randomness import Keystream, process_token, secure_stream

_LEAST_BLOCKS = 2
"""One is used while the next is made."""
_PARENT_CHECK_MS = 1000
_PR_SET_PDEATHSIG = 1


def _pipe() -> tuple[FileIO, FileIO]:
    reader, writer = os.pipe()
    return FileIO(reader, "r"), FileIO(writer, "w")


def _end_with_parent() -> Callable[[], None]:
    """What asks the kernel to kill this process with its parent. Looked up before the fork: the loader has a lock.

    Linux means the parent's *thread*, so it is asked only if that is the main one.
    """
    if sys.platform != "linux" or threading.current_thread() is not threading.main_thread():
        return lambda: None
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    return lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) if prctl else None


def _leave_parent(free: int, ready: int) -> None:
    """Let go of what the fork copied: files (and the locks on them), handlers, garbage with finalisers.

    All signals are blocked and stay so, but for SIGTERM.
    """
    gc.disable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    nowhere = os.open(os.devnull, os.O_RDWR)
    for standard in range(3):
        os.dup2(nowhere, standard)
    first, second = sorted((free, ready))
    for low, high in ((3, first), (first + 1, second), (second + 1, os.sysconf("SC_OPEN_MAX"))):
        os.closerange(low, high)


def _never_preempt() -> None:
    """If no core is idle, the parent's byte would wake the child on the parent's own core, for a millisecond each."""
    with suppress(AttributeError, OSError):  # not Linux, or forbidden
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _produce(slots: np.ndarray, free: int, ready: int, parent: int) -> None:
    """Fill one slot after the other, as they are given back, while the parent lives."""
    stream, made = secure_stream(), 0
    waiting = select.poll()
    waiting.register(free, select.POLLIN)
    while os.getppid() == parent:
        if not waiting.poll(_PARENT_CHECK_MS):
            continue
        if not os.read(free, 1):  # the parent closed its end
            return
        normals_into(stream, slots[made % len(slots)])
        made += 1
        os.write(ready, b"\0")


def _be_producer(
    slots: np.ndarray, free: int, ready: int, parent: int, end_with_parent: Callable[[], None]
) -> NoReturn:
    """The child's whole life: whatever happens, it never returns into the parent's code."""
    try:
        _leave_parent(free, ready)
        end_with_parent()
        _never_preempt()
        _produce(slots, free, ready, parent)
    finally:
        os._exit(0)


def _fork_producer(slots: np.ndarray) -> tuple[int, FileIO, FileIO]:
    """The child's process id, where to give slots back, and where to hear of filled ones. OSError if it can't be."""
    (to_fill, free), (ready, filled) = _pipe(), _pipe()
    parent, end_with_parent = os.getpid(), _end_with_parent()
    try:
        free.write(bytes(len(slots)))
        os.set_blocking(free.fileno(), False)
        os.set_blocking(ready.fileno(), False)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # no handler may run in the child
        try:
            child = os.fork()
            if child == 0:
                _be_producer(slots, to_fill.fileno(), filled.fileno(), parent, end_with_parent)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
    except OSError:
        free.close()
        ready.close()
        raise
    finally:
        to_fill.close()
        filled.close()
    return child, free, ready


class _Ring:
    """Slots in shared memory and the child that fills them. Not in `NoiseAhead`, so that dropping that ends this."""

    def __init__(self, blocks: int) -> None:
        self._process = process_token()
        self._slots = np.frombuffer(mmap.mmap(-1, blocks * BLOCK * 8)).reshape(blocks, BLOCK)
        self._rest = np.empty(0)
        self._taken, self._holds_slot = 0, False
        self.turn = threading.Lock()
        self.child, self._free, self._ready = _fork_producer(self._slots)

    def is_ours(self) -> bool:
        return not self._ready.closed and self._process == process_token()

    def take(self, most: int) -> np.ndarray | None:
        """Up to `most` normals that nobody else gets, valid until the next call, or None if there are none."""
        if not self.is_ours():
            return None
        if not self._rest.size:
            self.give_back()
            self._next_slot()
        piece, self._rest = self._rest[:most], self._rest[most:]
        return piece if piece.size else None

    def _next_slot(self) -> None:
        note = None if self._ready.closed else self._ready.read(1)  # None: nothing yet; empty: the child is gone
        if note:
            slot = self._slots[self._taken % len(self._slots)]
            self._taken += 1
            self._rest, self._holds_slot = slot, True
        elif note == b"":
            self.close()

    def give_back(self) -> None:
        """The caller is done with what it took: a slot that is used up may be filled again."""
        if self._holds_slot and not self._rest.size and self.is_ours():
            self._holds_slot = (
                False  # first: an interrupt before the write loses a slot; after it, it would give it twice
            )
            try:
                self._free.write(b"\0")
            except OSError:
                self.close()

    def close(self) -> None:
        """End the child and wait for that. It is not replaced: it may have died because memory was short."""
        self._free.close()
        self._ready.close()
        if self._process != process_token():
            return  # a forked copy: the child is its parent's
        try:
            if os.waitpid(self.child, os.WNOHANG)[0] == 0:  # still ours, so its id can't have gone to another process
                os.kill(self.child, signal.SIGKILL)
                os.waitpid(self.child, 0)
        except (ChildProcessError, ProcessLookupError):
            pass  # somebody waits for all children, and was first


def _start_ring(blocks: int) -> _Ring | None:
    if not hasattr(os, "fork"):
        return None
    try:
        return _Ring(blocks)
    except OSError:
        return None


class NoiseAhead:
    """Standard normals made ahead by another process, in place of a `Keystream` in `add_gaussian`.

    At most `ahead` normals (rounded up to whole blocks of 2¹⁸, at least two) wait at a time. If none is ready, the
    caller makes its own from `stream`. An insecure stream is used by the caller only, so that it repeats. In a
    forked copy of this process, all normals are the caller's own.
    """

    def __init__(self, stream: Keystream, ahead: int) -> None:
        self._stream = stream
        self._ring = None if stream.insecure else _start_ring(max(_LEAST_BLOCKS, -(-ahead // BLOCK)))
        self._end = weakref.finalize(self, self._ring.close) if self._ring else None

    def pieces(self, n: int) -> Iterator[np.ndarray]:
        """n normals, in pieces that the caller may overwrite. A piece is valid until the next one is asked for."""
        ring = self._ring
        if ring is None or not ring.is_ours():
            yield from normal_pieces(self._stream, n)
            return
        if not ring.turn.acquire(blocking=False):
            raise RuntimeError("noise made ahead serves one thread and one loop at a time: make another one")
        try:
            while n > 0:
                ready = ring.take(n)
                for piece in normal_pieces(self._stream, min(n, BLOCK)) if ready is None else (ready,):
                    n -= piece.size
                    yield piece
            ring.give_back()
        finally:
            ring.turn.release()

    def normals_into(self, out: np.ndarray) -> None:
        """Fill a flat float64 array."""
        filled = 0
        for piece in self.pieces(out.size):
            out[filled : filled + piece.size] = piece
            filled += piece.size

    def close(self) -> None:
        """End the other process and forget what is ready. What is asked for later is made by the caller."""
        if self._end:
            self._end()
        self._ring = None

    def __enter__(self) -> "NoiseAhead":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError("noise made ahead can't be pickled or copied: each normal is used once")
