"""Randomness that guards privacy: an AES-256-CTR keystream, keyed by the operating system.

Noise, Poisson sampling and masks are only as private as they are unpredictable, so they never come from a
seeded generator (Mersenne Twister and Philox can be predicted from their output). A `Keystream` draws 32 bytes
from `os.urandom` and stretches them by AES in counter mode, as fast as the processor's AES unit allows.

What is kept here:
- A secure stream can't be seeded, pickled or copied. Only `insecure_stream` repeats, and says so: `insecure` is True.
- No two processes share a stream: after `os.fork()` the child's copy takes a new key from the operating system.
- One stream belongs to one thread. Two threads that use it at the same moment get a RuntimeError, never the same words.
- The counter has 128 bits: no job comes near 2⁶⁴ blocks. The stream differs from true randomness as AES does from
  a random permutation, plus a distinguishing advantage below n²/2¹²⁹ after n blocks (2⁻⁵¹ for 2⁴⁰ normals).

Not defended: a virtual machine that is restored from a snapshot of its memory replays its streams, and sampling
times are not constant.
"""

import hashlib
import os
from fractions import Fraction
from typing import ClassVar, NoReturn

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes

from fedplat import canonical

KEY_BYTES = 32
_ZEROS = memoryview(bytes(1 << 17))
"""What is encrypted; small enough to stay in the cache."""
_ROWS_PER_PASS = 1 << 16
_LN2 = float(np.log(2.0))
_forks = 0


def _count_fork() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_count_fork)


def process_token() -> tuple[int, int]:
    """Differs between a process and its forked children. The pid sees forks from C, the count survives reused pids."""
    return os.getpid(), _forks


class Keystream:
    """A secret, endless stream of uniform bits. `Keystream()` is always secure; see `insecure_stream` for tests."""

    insecure: ClassVar[bool] = False
    """True where the key is known to others: written into ledger and report."""
    __slots__ = ("_cipher", "_process")
    _cipher: CipherContext
    _process: tuple[int, int]

    def __init__(self) -> None:
        self._start(os.urandom(KEY_BYTES))

    def _start(self, key: bytes) -> None:
        self._process = process_token()
        self._cipher = Cipher(algorithms.AES256(key), modes.CTR(bytes(16))).encryptor()

    def _after_fork(self) -> None:
        self._start(os.urandom(KEY_BYTES))

    def __reduce__(self) -> NoReturn:
        raise TypeError("a keystream can't be pickled or copied: make one where it is needed, with secure_stream()")

    def fill(self, out: np.ndarray) -> None:
        """Overwrite a contiguous array with random bits."""
        if not out.flags.c_contiguous:
            raise ValueError("only a contiguous array can be filled")
        self._fill(out.reshape(-1).view(np.uint8).data)

    def _fill(self, target: memoryview) -> None:
        if self._process != process_token():
            self._after_fork()
        for start in range(0, len(target), len(_ZEROS)):
            part = target[start : start + len(_ZEROS)]
            self._cipher.update_into(_ZEROS[: len(part)], part)

    def words(self, n: int) -> np.ndarray:
        """n uniform uint64."""
        out = np.empty(n, np.uint64)
        self.fill(out)
        return out

    def random_bytes(self, n: int) -> bytes:
        out = bytearray(n)
        self._fill(memoryview(out))
        return bytes(out)

    def below(self, k: int) -> int:
        """A uniform integer in [0, k), for k of any size. Too large draws are repeated: no modulo bias."""
        if k < 1:
            raise ValueError(f"below(k) needs k ≥ 1 (got {k})")
        bits = (k - 1).bit_length()
        size = -(-bits // 8)
        while True:
            draw = int.from_bytes(self.random_bytes(size), "little") & ((1 << bits) - 1)
            if draw < k:
                return draw

    def bernoulli(self, p: float | Fraction) -> bool:
        """True with probability exactly p: a float is the fraction that its bits stand for."""
        if not 0 <= p <= 1:
            raise ValueError(f"a probability lies in [0, 1] (got {p})")
        numerator, denominator = p.as_integer_ratio()
        return self.below(denominator) < numerator

    def uniform_rows(self, n: int, q: float) -> np.ndarray:
        """Indices (ascending, int64) of a Poisson sample: each of n rows by itself with probability ⌊q·2⁶⁴⌋ / 2⁶⁴.

        That is q itself for q ≥ 2⁻¹² (a float has 53 bits), and never more than q. An empty sample is a sample.
        """
        if not 0 <= q <= 1:
            raise ValueError(f"a sample rate lies in [0, 1] (got {q})")
        threshold = int(Fraction(q) * 2**64)
        if threshold == 2**64:
            return np.arange(n)
        limit, words = np.uint64(threshold), np.empty(min(n, _ROWS_PER_PASS), np.uint64)
        chosen = [np.empty(0, np.int64)]
        for start in range(0, n, _ROWS_PER_PASS):
            part = words[: min(_ROWS_PER_PASS, n - start)]
            self.fill(part)
            chosen.append(np.flatnonzero(part < limit) + start)
        return np.concatenate(chosen)

    def uniforms(self, n: int) -> np.ndarray:
        """n float64 in [0, 1), multiples of 2⁻⁵³."""
        words = self.words(n)
        words >>= np.uint64(11)
        return words * 2.0**-53

    def exponentials(self, n: int) -> np.ndarray:
        """n standard exponential float64, in full precision up to any size: never log(0), no largest value.

        −log u for u = 2⁻ᴳ·m with m in (½, 1]: G counts coin flips up to the first head. The probability of {E ≥ x}
        is right to a relative error of 2⁻⁵⁰·(1 + x), which is the rounding of log and of one addition.
        """
        words = self.words(n)
        words >>= np.uint64(12)
        mantissa = 1 - words * 2.0**-53  # exact, in (½, 1]
        result: np.ndarray = self._coin_flips(n) * _LN2
        result -= np.log(mantissa, out=mantissa)
        return result

    def _coin_flips(self, n: int) -> np.ndarray:
        """Tails before the first head: the trailing zeros of a word, and of the next one if all 64 are zero."""
        words = self.words(n)
        count: np.ndarray = np.bitwise_count(~words & (words - np.uint64(1))).astype(np.int64)
        endless = np.flatnonzero(words == 0)
        if endless.size:
            count[endless] += self._coin_flips(endless.size)
        return count


class _LabelledKeystream(Keystream):
    """The same stream for the same labels. In a forked child it refuses to go on where its parent might."""

    insecure: ClassVar[bool] = True
    __slots__ = ()

    def __init__(self, labels: tuple[str | int, ...]) -> None:
        text = canonical.dumps(["fedplat insecure keystream", *labels])
        self._start(hashlib.sha256(text.encode()).digest())

    def _after_fork(self) -> None:
        raise RuntimeError("an insecure stream was made before a fork: make it in the child, with labels of its own")


def secure_stream() -> Keystream:
    """A new stream with a key that nobody knows."""
    return Keystream()


def insecure_stream(*labels: str | int) -> Keystream:
    """A stream that repeats: for tests, under the job's explicit insecure flag. What it guards is not private."""
    return _LabelledKeystream(labels)
