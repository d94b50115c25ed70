"""A signed job: everything that decides what a site computes is under the signature."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedplat.consortium.identity import SigningKey
from fedplat.consortium.roster import OperatorEntry, Roster
from fedplat.consortium.signed_job import PURPOSE, SignedJob
from fedplat.errors import UsageError
from fedplat.job import Job, validate_job

LAWS = settings(max_examples=80, deadline=None)
OLGA, OTTO = SigningKey.generate(), SigningKey.generate()
ROSTER = Roster(
    consortium="alpha",
    version=3,
    issued="now",
    sites={},
    operators={"olga": OperatorEntry(identity=OLGA.public), "otto": OperatorEntry(identity=OTTO.public)},
)
JOB = validate_job({"job": {"name": "study", "rounds": 5}, "cohort": {"clients": 2, "sites": ["north", "south"]}}, "t")
SIGNED = SignedJob.sign(JOB, "alpha", "olga", OLGA, 1000.0)


def test_what_an_operator_signed_is_the_job():
    again = SignedJob.parse(SIGNED.text())
    assert again == SIGNED and again.verified(ROSTER) == JOB


def leaves(value: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    if isinstance(value, dict) and value:
        return [leaf for key, inner in value.items() for leaf in leaves(inner, (*path, key))]
    return [path]


PLACES = leaves(json.loads(JOB.canonical()))
values = st.none() | st.booleans() | st.integers(-5, 2**40) | st.floats(-1e9, 1e9) | st.text(max_size=6)


@LAWS
@given(st.sampled_from(PLACES), values)
def test_any_other_value_anywhere_in_the_job_breaks_the_signature(place, value):
    table = json.loads(JOB.canonical())
    inner = table
    for key in place[:-1]:
        inner = inner[key]
    if repr(inner[place[-1]]) == repr(value):
        return
    inner[place[-1]] = value
    text = json.dumps(table, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    with pytest.raises(UsageError, match="signature is not operator 'olga''s"):
        SIGNED.model_copy(update={"job": text}).verified(ROSTER)


def test_the_same_job_in_other_words_is_not_what_was_signed():
    """White space does not change what is computed, but a signature is over one text."""
    with pytest.raises(UsageError, match="signature"):
        SIGNED.model_copy(update={"job": SIGNED.job + " "}).verified(ROSTER)


CHANGED = {
    "the consortium": ({"consortium": "beta"}, "signed for consortium 'beta', this is 'alpha'"),
    "the operator": ({"operator": "otto"}, "signature is not operator 'otto''s"),
    "a stranger": ({"operator": "eve"}, "'eve' is no operator of this consortium"),
    "the time": ({"signed_at": 1001.0}, "signature"),
    "a later time": ({"signed_at": 1000.0000001}, "signature"),
    "no signature": ({"signature": ""}, "signature"),
    "an empty job": ({"job": ""}, "signature"),
}


@pytest.mark.parametrize(("change", "message"), CHANGED.values(), ids=CHANGED.keys())
def test_any_other_field_breaks_it(change, message):
    with pytest.raises(UsageError, match=message):
        SIGNED.model_copy(update=change).verified(ROSTER)


@LAWS
@given(st.integers(0, 64 * 8 - 1))
def test_any_flipped_bit_of_the_signature_breaks_it(place):
    raw = bytearray(bytes.fromhex(SIGNED.signature))
    raw[place // 8] ^= 1 << place % 8
    with pytest.raises(UsageError, match="signature"):
        SIGNED.model_copy(update={"signature": raw.hex()}).verified(ROSTER)


def test_what_was_signed_for_another_purpose_is_no_job():
    body = SIGNED.model_dump(exclude={"signature"})
    for purpose in ("roster", "statement", "ledger-head", "", PURPOSE + "/v1"):
        with pytest.raises(UsageError, match="signature"):
            SIGNED.model_copy(update={"signature": OLGA.sign(purpose, body)}).verified(ROSTER)


def test_a_revoked_operator_signs_no_more():
    later = ROSTER.model_copy(update={"version": 4, "operators": {"otto": ROSTER.operators["otto"]}})
    with pytest.raises(UsageError, match=r"'olga' is no operator of this consortium \(any more\)"):
        SIGNED.verified(later)
    rotated = ROSTER.model_copy(update={"operators": {"olga": OperatorEntry(identity=OTTO.public)}})
    with pytest.raises(UsageError, match="signature"):
        SIGNED.verified(rotated)


def test_a_name_can_not_be_claimed_with_another_key():
    with pytest.raises(UsageError, match="signature"):
        SignedJob.sign(JOB, "alpha", "olga", OTTO, 1000.0).verified(ROSTER)


TEXTS = [
    "",
    "{}",
    "null",
    "[]",
    "junk",
    JOB.canonical(),
    SIGNED.text()[:-1],
    SIGNED.text()[:-1] + ',"x":1}',
    "[" * 99_999,
]


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: repr(text[:12]))
def test_a_run_without_a_signed_job_is_told_what_to_do(text):
    with pytest.raises(UsageError, match="Submit it with: fedplat submit"):
        SignedJob.parse(text)


@pytest.mark.parametrize(
    "text", ["", "{", "{}", '{"job":{"rounds":7}}', '{"job":{"rounds":-1}}', "[" * 99_999, JOB.canonical() + "\n"]
)
def test_a_signature_does_not_make_nonsense_a_job(text):
    """An operator may sign anything: what is no job is refused all the same, and no default fills a gap."""
    body = {"job": text, "consortium": "alpha", "operator": "olga", "signed_at": 1.0}
    signed = SignedJob.model_validate(body | {"signature": OLGA.sign(PURPOSE, body)})
    with pytest.raises(UsageError):
        signed.verified(ROSTER)


@LAWS
@given(st.integers(0, 2**62), st.floats(0, 1e12, allow_nan=False))
def test_signing_and_verifying_are_inverse(seed, at):
    job: Job = validate_job({"job": {"seed": seed}}, "t")
    assert SignedJob.parse(SignedJob.sign(job, "alpha", "otto", OTTO, at).text()).verified(ROSTER) == job
