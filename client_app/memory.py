"""What a client keeps between rounds, in Flower's `Context.state`: named arrays, and the round that made them.

Two generations are kept. A request for the round that was trained last (a retry, a repeated message) starts from
what the client remembered before that round, so the same request gets the same reply. A server that went further
back than that gets an error: it would train on memories of rounds that, for it, never happened.
"""

from collections.abc import Mapping

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, RecordDict

from fedplat import wire
from fedplat.errors import UsageError
from fedplat.model import Arrays

NOW, BEFORE, ROUND = "fedplat.now", "fedplat.before", "fedplat.round"


def recall(memory: RecordDict, round_number: int) -> Arrays:
    """What training in this round starts from; empty in a client's first round."""
    last = _last_round(memory)
    if last > round_number:
        raise UsageError(
            f"asked for round {round_number}, but this client's state is that of round {last}: "
            "the server was set back, and client state can't follow it. Start a new run"
        )
    return _arrays(memory, BEFORE if last == round_number else NOW)


def latest(memory: RecordDict) -> Arrays:
    """What evaluation uses: the newest there is; empty if the client never trained."""
    return _arrays(memory, NOW)


def keep(memory: RecordDict, round_number: int, arrays: Mapping[str, np.ndarray]) -> None:
    """Remember these arrays as the outcome of this round.

    Arrays with NaN or infinity are not kept: the server refuses the update that came with them, but the
    client would start from them for ever.
    """
    if not all(np.isfinite(array).all() for array in arrays.values()):
        return
    before = wire.encode_arrays(recall(memory, round_number))
    memory[BEFORE], memory[NOW] = before, wire.encode_arrays(arrays)
    memory[ROUND] = ConfigRecord({"round": round_number})


def _last_round(memory: RecordDict) -> int:
    record = wire.records(memory, ConfigRecord).get(ROUND)
    number = 0 if record is None else record["round"]
    if not isinstance(number, int):
        raise UsageError(f"client state is damaged: its round is {number!r}")
    return number


def _arrays(memory: RecordDict, key: str) -> Arrays:
    record = wire.records(memory, ArrayRecord).get(key)
    return {} if record is None else wire.decode_arrays(record)
