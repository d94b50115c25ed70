"""Canonical JSON: equal values give equal bytes, and every value reads back."""

import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedplat import canonical

LAWS = settings(max_examples=80, deadline=None)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def reversed_keys(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: reversed_keys(value[key]) for key in reversed(value)}
    return [reversed_keys(v) for v in value] if isinstance(value, list) else value


@LAWS
@given(values)
def test_value_reads_back(value: Any) -> None:
    assert json.loads(canonical.dumps(value)) == value


@LAWS
@given(values)
def test_key_order_does_not_matter(value: Any) -> None:
    assert canonical.dumps(reversed_keys(value)) == canonical.dumps(value)
    assert canonical.digest(reversed_keys(value)) == canonical.digest(value)


@LAWS
@given(values)
def test_writing_what_was_read_gives_the_same_bytes(value: Any) -> None:
    written = canonical.dumps(value)
    assert canonical.dumps(json.loads(written)) == written


@LAWS
@given(values, values)
def test_different_texts_have_different_digests(one: Any, other: Any) -> None:
    assert (canonical.digest(one) == canonical.digest(other)) == (canonical.dumps(one) == canonical.dumps(other))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: [1, x], lambda x: {"a": {"b": x}}])
def test_nan_and_infinity_are_refused_anywhere(bad: float, wrap: Any) -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        canonical.dumps(wrap(bad))


def test_text_is_compact_utf8() -> None:
    assert canonical.dumps({"b": [1, 2.5], "a": "ü"}) == '{"a":"ü","b":[1,2.5]}'


def test_digest_is_sha256_of_the_utf8_bytes() -> None:
    # printf '{"a":1}' | sha256sum
    assert canonical.digest({"a": 1}) == "015abd7f5cc57a2dd94b7590f04ad8084273905ee33ec5cebeae62276a97f862"
