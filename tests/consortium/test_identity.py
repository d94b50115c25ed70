"""Who signed what: a signature holds for one value, one purpose and one key."""

import os
import stat
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from hypothesis import given, settings
from hypothesis import strategies as st

from fedplat.consortium.identity import SigningKey, is_signed, require_private, write_secret
from fedplat.consortium.keygen import private_pem
from fedplat.errors import UsageError

LAWS = settings(max_examples=80, deadline=None)
KEY, OTHER = SigningKey.generate(), SigningKey.generate()
purposes = st.sampled_from(["job", "roster", "ledger-head", "statement"])
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@LAWS
@given(purposes, purposes, json_values, json_values)
def test_a_signature_holds_for_its_purpose_and_value_alone(purpose, other_purpose, value, other):
    signature = KEY.sign(purpose, value)
    assert is_signed(KEY.public, signature, purpose, value)
    assert not is_signed(OTHER.public, signature, purpose, value)
    assert is_signed(KEY.public, signature, other_purpose, value) == (purpose == other_purpose)
    if value != other:
        assert not is_signed(KEY.public, signature, purpose, other)


@LAWS
@given(json_values, st.data())
def test_any_changed_bit_of_a_signature_or_key_breaks_it(value, data):
    for text, check in (
        (KEY.sign("job", value), lambda changed: is_signed(KEY.public, changed, "job", value)),
        (KEY.public, lambda changed: is_signed(changed, KEY.sign("job", value), "job", value)),
    ):
        raw = bytearray(bytes.fromhex(text))
        place = data.draw(st.integers(0, len(raw) * 8 - 1))
        raw[place // 8] ^= 1 << place % 8
        assert check(text) and not check(raw.hex())


@pytest.mark.parametrize("junk", ["", "00", "zz", "é", "00" * 64, "\0"])
def test_junk_is_no_signature_and_no_key(junk):
    assert not is_signed(KEY.public, junk, "job", {})
    assert not is_signed(junk, KEY.sign("job", {}), "job", {})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "\ud800"])
def test_what_has_no_canonical_form_is_signed_by_nobody(value):
    assert not is_signed(KEY.public, "00" * 64, "job", value)
    with pytest.raises(ValueError):
        KEY.sign("job", value)


def test_a_purpose_can_not_be_smuggled_into_a_value():
    """'a' + value and 'a/v1\\n…' must not run together."""
    signature = KEY.sign("job", "x")
    assert not is_signed(KEY.public, signature, 'job/v1\n"x"', "")


# --- keys on disk -----------------------------------------------------------------------------------


def test_a_key_survives_its_file(tmp_path):
    KEY.save(tmp_path / "identity.key")
    assert stat.S_IMODE((tmp_path / "identity.key").stat().st_mode) == 0o600
    again = SigningKey.load(tmp_path / "identity.key")
    assert again.public == KEY.public and is_signed(KEY.public, again.sign("job", 1), "job", 1)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o610, 0o601, 0o644, 0o666, 0o777])
def test_a_key_that_others_may_touch_is_refused(mode, tmp_path):
    path = tmp_path / "identity.key"
    KEY.save(path)
    path.chmod(mode)
    with pytest.raises(UsageError, match=f"mode {mode:04o}.*chmod 600 {path}"):
        SigningKey.load(path)
    path.chmod(0o400)
    SigningKey.load(path)


def test_a_secret_is_never_overwritten(tmp_path):
    path = tmp_path / "secret"
    write_secret(path, b"first")
    for attempt in (lambda: write_secret(path, b"second"), lambda: KEY.save(path)):
        with pytest.raises(UsageError, match="never overwritten"):
            attempt()
    assert path.read_bytes() == b"first"


@pytest.mark.parametrize("target", ["exists", "missing"])
def test_a_secret_is_not_written_through_a_link(target, tmp_path):
    (tmp_path / "exists").write_bytes(b"theirs")
    (tmp_path / "secret").symlink_to(tmp_path / target)
    with pytest.raises(UsageError, match="never overwritten"):
        write_secret(tmp_path / "secret", b"mine")
    assert (tmp_path / "exists").read_bytes() == b"theirs" and not (tmp_path / "missing").exists()


def test_a_secret_is_private_whatever_the_umask_is(tmp_path):
    before = os.umask(0)
    try:
        write_secret(tmp_path / "secret", b"x")
    finally:
        os.umask(before)
    require_private(tmp_path / "secret")


def ec_key(path: Path) -> None:
    write_secret(path, private_pem(ec.generate_private_key(ec.SECP256R1())))


BAD = {
    "missing": (lambda path: None, "no such key"),
    "empty": (lambda path: write_secret(path, b""), "can't be read as a private key"),
    "junk": (lambda path: write_secret(path, b"junk"), "can't be read as a private key"),
    "a folder": (lambda path: path.mkdir(mode=0o700), "can't be read as a private key"),
    "another kind": (ec_key, "not an Ed25519 key"),
}


@pytest.mark.parametrize(("make", "message"), BAD.values(), ids=BAD.keys())
def test_what_is_no_identity_key_is_explained(make, message, tmp_path):
    make(tmp_path / "identity.key")
    with pytest.raises(UsageError, match=message):
        SigningKey.load(tmp_path / "identity.key")
