"""Keys that are made at the party, and the one file that leaves it."""

import base64
import json
import stat
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import NameOID

from fedplat.consortium.authority import load_certificate
from fedplat.consortium.keygen import SECRETS, PartyKeys, keygen, load_bundle
from fedplat.errors import UsageError
from tests.consortium.conftest import Consortium


def _bring(consortium: Consortium, name: str, role: str = "site") -> Path:
    """The party makes its keys; only the bundle comes to who provisions."""
    keys = consortium.folder.parent / f"at-{name}"
    bundle = keygen(name, keys, role)  # type: ignore[arg-type]
    (consortium.folder / bundle.name).write_bytes(bundle.read_bytes())
    consortium.public = (*consortium.public, name)
    return keys


@pytest.mark.parametrize("role", ["site", "operator"])
def test_private_halves_are_private_and_never_overwritten(tmp_path: Path, role: str) -> None:
    keygen("north", tmp_path / "keys", role)  # type: ignore[arg-type]
    assert stat.S_IMODE((tmp_path / "keys").stat().st_mode) == 0o700
    secrets = {file: (tmp_path / "keys" / file).read_bytes() for file in SECRETS[role]}  # type: ignore[index]
    assert all(stat.S_IMODE((tmp_path / "keys" / file).stat().st_mode) == 0o600 for file in secrets)
    with pytest.raises(UsageError, match="never overwritten"):
        keygen("north", tmp_path / "keys", role)  # type: ignore[arg-type]
    assert secrets == {file: (tmp_path / "keys" / file).read_bytes() for file in secrets}


def test_flower_takes_the_node_key(tmp_path: Path) -> None:
    keygen("north", tmp_path)
    key = serialization.load_ssh_private_key((tmp_path / "node").read_bytes(), password=None)
    assert isinstance(key, ec.EllipticCurvePrivateKey) and isinstance(key.curve, ec.SECP384R1)
    public = serialization.load_ssh_public_key((tmp_path / "node.pub").read_bytes())
    assert public == key.public_key()


def test_nothing_secret_is_in_the_bundle_or_in_any_kit(consortium: Consortium) -> None:
    consortium.sites += ("west",)
    consortium.operators += ("otto",)
    homes = [_bring(consortium, "west"), _bring(consortium, "otto", "operator")]
    secrets = {file.read_bytes() for home in homes for file in home.iterdir() if ".pub" not in file.name}
    assert len(secrets) == 6
    consortium.provision()
    for name, content in consortium.files().items():
        assert not any(secret in content for secret in secrets), name
    for home in homes:
        bundle = next(home.glob("*.public.json")).read_bytes()
        assert b"PRIVATE" not in bundle and not any(secret in bundle for secret in secrets)
    assert not [f for f in SECRETS["site"] if (consortium.kit("west") / f).exists()]


def test_kit_and_keys_fit_together(consortium: Consortium) -> None:
    consortium.sites += ("west",)
    home = _bring(consortium, "west")
    consortium.provision()
    key = serialization.load_pem_private_key((home / "tls.key").read_bytes(), password=None)
    assert load_certificate(consortium.kit("west") / "tls.crt").public_key() == key.public_key()
    entry = consortium.issued().roster([]).sites["west"]
    assert entry.node == (home / "node.pub").read_text().strip()


def test_whatever_the_request_asks_for_the_authority_decides(consortium: Consortium) -> None:
    keys = PartyKeys.generate()
    subject = x509.Name(
        [
            x509.NameAttribute(NameOID.COMMON_NAME, "olga"),
            x509.NameAttribute(NameOID.ORGANIZATIONAL_UNIT_NAME, "operator"),
        ]
    )
    request = x509.CertificateSigningRequestBuilder().subject_name(subject)
    request = request.add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
    csr = request.sign(keys.tls, hashes.SHA256()).public_bytes(serialization.Encoding.PEM).decode()
    bundle = keys.public("west").model_copy(update={"csr": csr})
    (consortium.folder / "west.public.json").write_text(bundle.model_dump_json())
    consortium.sites, consortium.public = (*consortium.sites, "west"), ("west",)
    consortium.provision()
    certificate = load_certificate(consortium.kit("west") / "tls.crt")
    assert {a.value for a in certificate.subject} == {"west", "site", "alpha"}
    assert not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca


def _csr(key: object) -> str:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "west")])
    request = x509.CertificateSigningRequestBuilder().subject_name(name).sign(key, hashes.SHA256())  # type: ignore[arg-type]
    return request.public_bytes(serialization.Encoding.PEM).decode()


def _forged() -> str:
    """A request whose signature is another's."""
    lines = _csr(ec.generate_private_key(ec.SECP256R1())).splitlines()
    body = bytearray(base64.b64decode("".join(lines[1:-1])))
    body[-1] ^= 1
    text = base64.b64encode(body).decode()
    return f"{lines[0]}\n{text}\n{lines[-1]}\n"


SSH_P256 = (
    ec.generate_private_key(ec.SECP256R1())
    .public_key()
    .public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    .decode()
)
BAD = [
    ({"name": "north"}, "keys of 'north'"),
    ({"name": "../west"}, "name"),
    ({"identity": "00"}, "identity"),
    ({"identity": "Z" * 64}, "identity"),
    ({"node": "ssh-rsa x"}, "node's public key"),
    ({"node": SSH_P256}, "P-384"),
    ({"csr": "nothing"}, "certificate request"),
    ({"csr": _csr(rsa.generate_private_key(65537, 2048))}, "EC key"),
    ({"csr": _forged()}, "not signed by the key"),
    ({"extra": 1}, "unknown key"),
]


@pytest.mark.parametrize(("change", "message"), BAD)
def test_a_bundle_that_is_not_right_is_refused_before_anything_is_written(
    consortium: Consortium, change: dict[str, object], message: str
) -> None:
    bundle = json.loads(PartyKeys.generate().public("west").model_dump_json())
    path = consortium.folder / "west.public.json"
    path.write_text(json.dumps({**bundle, **change}))
    with pytest.raises(UsageError, match=message):
        load_bundle(path, "west")
    before = consortium.files()
    consortium.sites, consortium.public = (*consortium.sites, "east", "west"), ("west",)
    with pytest.raises(UsageError, match=message):
        consortium.provision()
    assert consortium.files() == before


def test_nobody_can_bring_another_s_identity(consortium: Consortium) -> None:
    stolen = consortium.issued().parties["north"].identity
    bundle = PartyKeys.generate().public("west").model_copy(update={"identity": stolen})
    (consortium.folder / "west.public.json").write_text(bundle.model_dump_json())
    before = consortium.files()
    consortium.sites, consortium.public = (*consortium.sites, "west"), ("west",)
    with pytest.raises(UsageError, match="'north' and 'west' have the same key"):
        consortium.provision()
    assert consortium.files() == before


@pytest.mark.parametrize("name", ["../x", "a/b", "", "server", "x\n", ".", "-x"])
def test_a_name_that_is_more_than_a_name_gets_no_keys(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="no name for a party"):
        keygen(name, tmp_path / "keys")
    assert not list(tmp_path.iterdir())
