"""A message's content as one record: what keeps a small model's round short.

Flower moves every record and array as objects of their own, two or more for an array, with one call for each on every
hop of the way. Packed, all of a message that is small is one object; only large arrays, which Flower cuts into chunks
anyway, stay beside it.

The law: unpack(pack(x)) == x. Whoever unpacks gets ordinary records and judges them as if they had come unpacked.
"""

import json
import struct

import numpy as np
import safetensors
import safetensors.numpy
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from fedplat.records import decode_records, encode_records

PACKED = "packed"
"""The record that holds the others, as `header length · header · arrays`."""
ROOM = 2 << 20
"""Arrays go in as long as they fit into so many bytes; a message with more is dominated by its chunks."""
_BYTES, _NAMES, _LENGTH = "bytes", "names", struct.Struct("<Q")


def is_packed(content: RecordDict) -> bool:
    return PACKED in content


def pack(content: RecordDict) -> RecordDict:
    """The same content in one record, and what is too large for it beside it."""
    if PACKED in content:
        raise ValueError(f"a record can't be called '{PACKED}'")
    inside, beside, room = RecordDict(), RecordDict(), ROOM
    names: dict[str, list[str]] = {}
    for key, record in content.items():
        inside[key] = record
        if isinstance(record, ArrayRecord):
            small: dict[str, Array] = {}
            for name, array in record.items():
                if len(array.data) <= room:
                    small[name], room = array, room - len(array.data)
            names[key] = list(record)
            inside[key] = ArrayRecord(small)
            if len(small) < len(record):
                beside[key] = ArrayRecord({name: array for name, array in record.items() if name not in small})
    layout, arrays = encode_records(inside)
    header = json.dumps({"layout": layout, _NAMES: names}).encode()
    data = _LENGTH.pack(len(header)) + header + safetensors.numpy.save(arrays)
    return RecordDict({PACKED: ConfigRecord({_BYTES: data}), **beside})


def unpack(content: RecordDict) -> RecordDict:
    """What was packed; content that was not is returned as it is. ValueError: these are no packed records."""
    if not is_packed(content):
        return content
    try:
        return _unpack(content)
    except (ValueError, TypeError, KeyError, AttributeError, struct.error, RecursionError) as error:
        raise ValueError(f"packed records can't be read: {type(error).__name__}: {error!s:.200}") from None
    except safetensors.SafetensorError as error:
        raise ValueError(f"packed arrays can't be read: {error}") from None


def _unpack(content: RecordDict) -> RecordDict:
    record = content[PACKED]
    if not isinstance(record, ConfigRecord) or set(record) != {_BYTES}:
        raise ValueError("not one record of bytes")
    data = record[_BYTES]
    if not isinstance(data, bytes):
        raise ValueError("not bytes")
    (length,) = _LENGTH.unpack_from(data)
    start = _LENGTH.size + length
    header = json.loads(data[_LENGTH.size : start])
    arrays: dict[str, np.ndarray] = safetensors.numpy.load(data[start:])
    found = decode_records(header["layout"], arrays)
    beside = {key: other for key, other in content.items() if key != PACKED}
    for key, names in header[_NAMES].items():
        inside, outside = found[key], beside.pop(key, ArrayRecord())
        if not (isinstance(inside, ArrayRecord) and isinstance(outside, ArrayRecord)):
            raise ValueError(f"'{key:.50}' is no array record")
        both = {**inside, **outside}
        if len(names) != len(inside) + len(outside) or set(names) != set(both):
            raise ValueError(f"the arrays of '{key:.50}' are not those that it names")
        found[key] = ArrayRecord({name: both[name] for name in names})
    if beside:
        raise ValueError(f"'{next(iter(beside)):.50}' came unannounced")
    return found
