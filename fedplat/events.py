"""The event log of a run: `events.jsonl`, the one source of truth about what happened.

One JSON object per line. Progress bar, plots, `fedplat runs` and TensorBoard all read it.
The file is append-only. When a run is resumed, a `resumed` event names the last committed round;
events of later rounds that stand before it were undone by the crash, and `read_events` drops them.

`docs/run-directory.md` documents each event; `fedplat job schema --events` prints the JSON schema.
"""

import errno
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError

from fedplat.errors import UsageError

Metrics = dict[str, float]
LONGEST_REASON = 300
"""A reason may quote what a client sent; the log must not grow by it."""


class EventBase(BaseModel):
    # A diverged loss is news, not corruption: NaN and infinities are written as strings and read back.
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, ser_json_inf_nan="strings")

    time: float = Field(default_factory=time.time)
    """Seconds since the epoch."""


class RunStarted(EventBase):
    """The first event of every run."""

    event: Literal["run_started"] = "run_started"
    run: str
    job_digest: str
    """SHA-256 of the job's canonical JSON."""
    clients: int
    rounds: int
    parameters: int
    """Numbers in the arrays that travel."""
    where: Literal["simulation", "flower"] = "simulation"
    """Virtual clients, or a real Flower federation; a run is resumed where it was started."""
    ledger: str | None = None
    """Id of the ledger of a private run, which goes on with no other."""
    witnesses: dict[str, float] = Field(default_factory=dict)
    """ε of a private run as it is planned, by each accountant that takes it: they agree, or the run doesn't start."""
    versions: dict[str, str]


class RoundStarted(EventBase):
    """A cohort was sampled and asked to train."""

    event: Literal["round_started"] = "round_started"
    round: int
    cohort: list[str]


class ClientTrained(EventBase):
    """An update arrived and passed all checks."""

    event: Literal["client_trained"] = "client_trained"
    round: int
    client: str
    num_examples: int
    update_norm: float
    """L2 distance between the update and the global model."""
    metrics: Metrics


class ClientFailed(EventBase):
    """A client gave no usable answer."""

    event: Literal["client_failed"] = "client_failed"
    round: int
    client: str
    phase: Literal["train", "evaluate"]
    kind: Literal["error", "late", "refused"]
    """error: the client reported one; late: no reply before the deadline; refused: the reply failed a check."""
    reason: Annotated[str, BeforeValidator(lambda reason: str(reason)[:LONGEST_REASON])]
    attempt: int


class RoundFinished(EventBase):
    """The round's updates were aggregated (or skipped)."""

    event: Literal["round_finished"] = "round_finished"
    round: int
    aggregated: bool
    accepted: int
    failed: int
    late: int
    refused: int
    metrics: Metrics
    """Means over accepted updates, weighted by examples."""
    seconds: float
    bytes_down: int
    bytes_up: int


class Evaluated(EventBase):
    """The global model was measured; round 0 is the initial model."""

    event: Literal["evaluated"] = "evaluated"
    round: int
    where: Literal["server", "clients"]
    num_examples: int
    metrics: Metrics
    best: bool = False
    """The best value of evaluation.metric so far."""


class PrivacySpent(EventBase):
    """What privacy has cost so far: the claim for whoever it has cost most."""

    event: Literal["privacy_spent"] = "privacy_spent"
    round: int
    unit: Literal["sample", "client"]
    relation: Literal["add-remove", "zero-out", "replace-one"]
    epsilon: float
    """ε of all releases so far, repeated rounds included; `accountant` says whose."""
    delta: float
    accountant: Literal["pld", "rdp", "prv"]
    releases: int
    """Rounds released: by the client that has released most (unit sample), by the federation (unit client)."""
    trusts_server: bool
    """The server sees single updates before noise is added."""
    insecure_noise: bool = False
    """Noise came from the job's seed, for a test: nothing here is private."""


class ClientEvaluated(EventBase):
    """One client's own evaluation on its held-out examples."""

    event: Literal["client_evaluated"] = "client_evaluated"
    round: int
    client: str
    num_examples: int
    metrics: Metrics


class Checkpointed(EventBase):
    """A checkpoint was committed; `fedplat resume` continues after this round."""

    event: Literal["checkpointed"] = "checkpointed"
    round: int


class Resumed(EventBase):
    """The run went on from a checkpoint; earlier events of later rounds don't count."""

    event: Literal["resumed"] = "resumed"
    round: int


class Interrupted(EventBase):
    """The run was stopped by a person (Ctrl-C) or by SIGTERM; it can be resumed."""

    event: Literal["interrupted"] = "interrupted"
    round: int


class RunFailed(EventBase):
    """The run could not go on; it can be resumed once the reason is mended."""

    event: Literal["run_failed"] = "run_failed"
    round: int
    reason: str


class RunFinished(EventBase):
    """The last event of a run that completed."""

    event: Literal["run_finished"] = "run_finished"
    round: int
    reason: Literal["rounds", "target", "patience"]
    """Why it ended: all rounds done, target reached, or no improvement for evaluation.patience."""
    model_sha256: str
    """SHA-256 of model.safetensors."""


Event = (
    RunStarted
    | RoundStarted
    | ClientTrained
    | ClientFailed
    | RoundFinished
    | Evaluated
    | PrivacySpent
    | ClientEvaluated
    | Checkpointed
    | Resumed
    | Interrupted
    | RunFailed
    | RunFinished
)
Listener = Callable[[Event], None]
EVENT = TypeAdapter[Event](Annotated[Event, Field(discriminator="event")])


class EventLog:
    """Appends events to the file and tells the listeners (progress bar, TensorBoard)."""

    def __init__(self, path: Path, listeners: tuple[Listener, ...] = ()) -> None:
        self._listeners = listeners
        _drop_torn_line(path)
        self._file = path.open("ab", buffering=0)

    def append(self, event: Event) -> None:
        line = event.model_dump_json().encode() + b"\n"
        start = self._file.tell()
        try:
            written = self._file.write(line)
            if written != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            self._file.truncate(start)  # a full disk must not leave half a line behind
            raise
        for listener in self._listeners:
            listener(event)

    def sync(self) -> None:
        """Make everything appended so far survive a power cut."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def _drop_torn_line(path: Path) -> None:
    """A crash in the middle of a write leaves half a line; cut it off before appending."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        content = file.read()
        file.truncate(content.rfind(b"\n") + 1)


def read_events(path: Path) -> list[Event]:
    """All events that count, oldest first."""
    events: list[Event] = []
    for event in _parse_lines(path):
        if isinstance(event, Resumed):
            events = [e for e in events if _survives(e, event.round)]
        events.append(event)
    return events


def _survives(event: Event, committed: int) -> bool:
    """Does an event still count after a resume from this round? From round 0, the initial evaluation is done again."""
    if isinstance(event, RunStarted):
        return True
    undone = event.round > committed or (committed == 0 and event.round == 0)
    return not undone and not isinstance(event, Interrupted | RunFailed)


def _parse_lines(path: Path) -> Iterator[Event]:
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        raise UsageError(f"{path}: not found: this is not a fedplat run directory") from None
    for number, line in enumerate(lines[:-1], start=1):  # what follows the last newline was never finished
        try:
            yield EVENT.validate_python(json.loads(line))
        except (ValidationError, ValueError) as error:
            raise UsageError(f"{path}: line {number} is not an event ({error}): the run is corrupted") from None
