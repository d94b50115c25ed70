"""Flower records on disk, without pickle: arrays into safetensors, everything else into JSON.

Used for the state that a client keeps between rounds (`Context.state`). The law: decode(encode(x)) == x.
"""

import base64
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from fedplat.wire import decode_arrays, encode_arrays

Encoded = tuple[dict[str, Any], dict[str, np.ndarray]]


def encode_records(records: RecordDict) -> Encoded:
    """A JSON value and a table of arrays that together hold all records."""
    layout: dict[str, Any] = {}
    arrays: dict[str, np.ndarray] = {}
    for number, (key, record) in enumerate(records.items()):
        if isinstance(record, ArrayRecord):
            names = list(record)
            layout[key] = {"kind": "arrays", "names": names}
            for position, array in enumerate(decode_arrays(record).values()):
                arrays[f"{number}/{position}"] = array
        elif isinstance(record, MetricRecord):
            layout[key] = {"kind": "metrics", "values": dict(record)}
        elif isinstance(record, ConfigRecord):
            layout[key] = {"kind": "config", "values": {k: _encode_value(v) for k, v in record.items()}}
        else:
            raise TypeError(f"client state '{key}' is a {type(record).__name__}, which can't be checkpointed")
    return layout, arrays


def decode_records(layout: dict[str, Any], arrays: dict[str, np.ndarray]) -> RecordDict:
    records = RecordDict()
    for number, (key, entry) in enumerate(layout.items()):
        match entry["kind"]:
            case "arrays":
                named = {name: arrays[f"{number}/{i}"] for i, name in enumerate(entry["names"])}
                records[key] = encode_arrays(named)
            case "metrics":
                records[key] = MetricRecord(entry["values"])
            case "config":
                records[key] = ConfigRecord({k: _decode_value(v) for k, v in entry["values"].items()})
    return records


def _encode_value(value: Any) -> Any:
    if isinstance(value, bytes):
        return {"base64": base64.b64encode(value).decode()}
    return [_encode_value(v) for v in value] if isinstance(value, list) else value


def _decode_value(value: Any) -> Any:
    if isinstance(value, dict):
        return base64.b64decode(value["base64"])
    return [_decode_value(v) for v in value] if isinstance(value, list) else value
