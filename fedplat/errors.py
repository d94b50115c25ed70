"""The two ways a command can end badly, and how they read.

A `UsageError` is the caller's to mend (exit code 2): nothing was started, nothing was lost.
A `JobError` is a job that started and could not finish (exit code 1): its run directory
holds everything up to the last committed round.

Every message says what to do next, in the voice of the command line: `error: <where>: <what>. <do this>`.
"""

import difflib
from collections.abc import Iterable


class FedplatError(Exception):
    """Base of all errors that are shown to a person without a traceback."""

    exit_code = 1


class UsageError(FedplatError):
    """Wrong input: a bad job file, an unknown name, a run directory that exists."""

    exit_code = 2


class JobError(FedplatError):
    """A job that was fine on paper and failed while running."""


def nearest(word: str, valid: Iterable[str]) -> str | None:
    """The valid name a person most likely meant, or None if none is close."""
    matches = difflib.get_close_matches(word, list(valid), n=1, cutoff=0.6)
    return matches[0] if matches else None


def unknown_name(what: str, word: str, valid: Iterable[str]) -> str:
    """`unknown strategy 'FedAvgg' (did you mean 'FedAvg'?). Valid: …`."""
    names = sorted(valid)
    guess = nearest(word, names)
    hint = f" (did you mean '{guess}'?)" if guess else ""
    return f"unknown {what} '{word}'{hint}. Valid: {', '.join(names)}"
