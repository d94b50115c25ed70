"""Checkpoints: everything the next round depends on, committed in one atomic rename.

    checkpoints/round-000012/
        state.json              round, job digest, progress, and the SHA-256 of every file beside it
        model.safetensors       the arrays that travel
        strategy.safetensors    what the strategy remembers (absent if it has no codec)
        clients.safetensors     what virtual clients remember (absent if nothing)

There is no random state to keep: every stream is a function of the job's seed and the round.
A checkpoint that fails its own hashes is refused by name, never skipped without a word.
"""

import hashlib
import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import safetensors.numpy
from flwr.app import RecordDict
from pydantic import BaseModel, ConfigDict, ValidationError

from fedplat.errors import UsageError
from fedplat.files import write_directory, write_file
from fedplat.model import Arrays
from fedplat.records import decode_records, encode_records

FORMAT = 1


class Progress(BaseModel):
    """What the driver remembers besides arrays."""

    model_config = ConfigDict(frozen=True)

    best_value: float | None = None
    best_round: int | None = None
    stale: int = 0
    """Evaluations since the best one."""
    stop: Literal["target", "patience"] | None = None
    """Why the run ends with this round, if it does."""


@dataclass(frozen=True)
class Checkpoint:
    round: int
    job_digest: str
    arrays: Arrays
    strategy: Arrays | None
    """None: this strategy has no codec, and the run can't be resumed."""
    progress: Progress = field(default_factory=Progress)
    clients: Mapping[str, RecordDict] = field(default_factory=dict)


@runtime_checkable
class HoldsClientState(Protocol):
    """A Grid whose clients' state lives in this process and must be checkpointed with the round."""

    def client_states(self) -> Mapping[str, RecordDict]: ...
    def restore_client_states(self, states: Mapping[str, RecordDict]) -> None: ...


class CheckpointStore:
    """The checkpoints of one run."""

    def __init__(self, folder: Path, keep: int) -> None:
        self._folder = folder
        self._keep = keep

    def save(self, checkpoint: Checkpoint) -> None:
        files = {"model.safetensors": safetensors.numpy.save(checkpoint.arrays)}
        if checkpoint.strategy is not None:
            files["strategy.safetensors"] = safetensors.numpy.save(checkpoint.strategy)
        if checkpoint.clients:
            files["clients.safetensors"] = _encode_clients(checkpoint.clients)
        state = {
            "format": FORMAT,
            "round": checkpoint.round,
            "job_digest": checkpoint.job_digest,
            "progress": checkpoint.progress.model_dump(),
            "sha256": {name: hashlib.sha256(content).hexdigest() for name, content in files.items()},
        }
        files["state.json"] = json.dumps(state, indent=2).encode()
        write_directory(self._folder / f"round-{checkpoint.round:06d}", files)
        self._prune(checkpoint.progress.best_round)

    def save_best(self, round_number: int, arrays: Arrays) -> None:
        """Keep the best model beside the checkpoints; `Progress.best_round` refers to it."""
        write_file(self._best_path(round_number), safetensors.numpy.save(arrays))

    def load_best(self, round_number: int) -> Arrays:
        return dict(safetensors.numpy.load_file(self._best_path(round_number)))

    def latest(self) -> Checkpoint | None:
        """The newest committed checkpoint, verified; None if the run never committed a round."""
        rounds = self._rounds()
        return self._load(rounds[-1]) if rounds else None

    def _best_path(self, round_number: int) -> Path:
        return self._folder / f"best-{round_number:06d}.safetensors"

    def _rounds(self) -> list[Path]:
        return sorted(p for p in self._folder.iterdir() if re.fullmatch(r"round-\d{6,}", p.name))

    def _prune(self, best_round: int | None) -> None:
        for old in self._rounds()[: -self._keep]:
            shutil.rmtree(old)
        kept = None if best_round is None else self._best_path(best_round).name
        for best in self._folder.glob("best-*.safetensors"):
            if best.name != kept:
                best.unlink()

    def _load(self, path: Path) -> Checkpoint:
        try:
            state = json.loads((path / "state.json").read_text())
            contents = {name: (path / name).read_bytes() for name in state["sha256"]}
            for name, content in contents.items():
                if hashlib.sha256(content).hexdigest() != state["sha256"][name]:
                    raise ValueError(f"{name} does not have the recorded SHA-256")
            return _decode(state, contents)
        except (OSError, ValueError, KeyError, TypeError, ValidationError) as error:
            raise UsageError(
                f"{path}: corrupted checkpoint ({error}). Remove that folder to continue from the one before it"
            ) from None


def _decode(state: dict[str, Any], contents: Mapping[str, bytes]) -> Checkpoint:
    if state["format"] != FORMAT:
        raise ValueError(f"format {state['format']} is not the one this fedplat writes ({FORMAT})")
    tables = {name: safetensors.numpy.load(content) for name, content in contents.items() if "clients" not in name}
    clients = contents.get("clients.safetensors")
    return Checkpoint(
        round=int(state["round"]),
        job_digest=str(state["job_digest"]),
        arrays=tables["model.safetensors"],
        strategy=tables.get("strategy.safetensors"),
        progress=Progress.model_validate(state["progress"]),
        clients=_decode_clients(clients) if clients is not None else {},
    )


def _encode_clients(states: Mapping[str, RecordDict]) -> bytes:
    layouts: dict[str, Any] = {}
    tables: Arrays = {}
    for client, records in states.items():
        layouts[client], arrays = encode_records(records)
        tables.update({f"{client}/{key}": array for key, array in arrays.items()})
    text = np.frombuffer(json.dumps(layouts).encode(), np.uint8)
    return safetensors.numpy.save({"layouts": text, **tables})


def _decode_clients(content: bytes) -> dict[str, RecordDict]:
    tables = safetensors.numpy.load(content)
    layouts = json.loads(tables.pop("layouts").tobytes())
    of_client: dict[str, Arrays] = {client: {} for client in layouts}
    for key, array in tables.items():
        client, _, rest = key.partition("/")
        of_client[client][rest] = array
    return {client: decode_records(layout, of_client[client]) for client, layout in layouts.items()}
