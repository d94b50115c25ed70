"""Canonical JSON: one byte string per value, so that digests and signatures are well defined.

Keys are sorted, there is no white space, text is UTF-8, floats are written in Python's shortest
form that reads back to the same bits. NaN and infinities have no JSON form and are refused.
The law kept here: `json.loads(dumps(x)) == x`, whatever the order in which keys were written.
"""

import hashlib
import json
from typing import Any


def dumps(value: Any) -> str:
    """The canonical JSON text of a value made of dicts, lists, strings, numbers, booleans and None."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def loads(text: str) -> Any:
    """Read JSON from somebody who is not trusted: whatever is wrong with it is a ValueError."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def digest(value: Any) -> str:
    """SHA-256 of the canonical JSON, in hex."""
    return hashlib.sha256(dumps(value).encode()).hexdigest()
