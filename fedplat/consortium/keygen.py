"""A party's private keys, and the one file of public halves that travels.

`fedplat site keygen` makes them at the party, so that nobody else ever holds them. The certificate request in the
bundle proves possession of the TLS key; whatever subject it asks for is ignored, because the authority decides who is
who. Where no bundle is given, provisioning makes the same keys on the party's behalf.
"""

import json
import re
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from pydantic import Field

from fedplat.consortium.identity import SigningKey, write_secret
from fedplat.consortium.roster import NAME, Hex32, PartyName
from fedplat.consortium.spec import RESERVED, Role, validated
from fedplat.errors import UsageError
from fedplat.files import write_file
from fedplat.job_sections import Section

IDENTITY_KEY, TLS_KEY, NODE_KEY, NODE_PUBLIC = "identity.key", "tls.key", "node", "node.pub"
SUPEREXEC_SECRET = "superexec.secret"
SECRETS: dict[Role, tuple[str, ...]] = {
    "site": (IDENTITY_KEY, TLS_KEY, NODE_KEY, SUPEREXEC_SECRET),
    "operator": (IDENTITY_KEY, TLS_KEY),
}
MOST_BYTES = 64 * 1024
"""A bundle is a few kilobytes; a larger file is none."""


class PublicBundle(Section):
    """What provisioning learns of a party that keeps its own keys."""

    name: PartyName
    identity: Hex32
    node: Annotated[str, Field(max_length=1024)]
    csr: Annotated[str, Field(max_length=16384)]

    def tls_public_key(self) -> ec.EllipticCurvePublicKey:
        """The key of the certificate request, if its owner signed the request."""
        try:
            request = x509.load_pem_x509_csr(self.csr.encode())
            key, signed = request.public_key(), request.is_signature_valid
        except (ValueError, UnsupportedAlgorithm) as error:
            raise UsageError(f"the certificate request can't be read: {error}") from None
        if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1 | ec.SECP384R1):
            raise UsageError("the certificate request must be for an EC key on P-256 or P-384")
        if not signed:
            raise UsageError("the certificate request is not signed by the key that it names")
        return key

    def node_public(self) -> str:
        """The SuperNode's key in its one canonical form, without a comment."""
        try:
            key = serialization.load_ssh_public_key(self.node.encode())
        except (ValueError, UnsupportedAlgorithm) as error:
            raise UsageError(f"the node's public key can't be read: {error}") from None
        if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP384R1):
            raise UsageError("the node's public key must be ECDSA on P-384 (Flower takes no other)")
        return _ssh_public(key)


@dataclass(frozen=True)
class PartyKeys:
    """All private keys of one party."""

    identity: SigningKey
    node: ec.EllipticCurvePrivateKey
    tls: ec.EllipticCurvePrivateKey

    @classmethod
    def generate(cls) -> "PartyKeys":
        node, tls = ec.generate_private_key(ec.SECP384R1()), ec.generate_private_key(ec.SECP256R1())
        return cls(SigningKey.generate(), node, tls)

    def save(self, folder: Path, role: Role) -> None:
        self.identity.save(folder / IDENTITY_KEY)
        write_secret(folder / TLS_KEY, private_pem(self.tls))
        if role == "site":
            write_secret(folder / NODE_KEY, _ssh_private(self.node))
            write_file(folder / NODE_PUBLIC, _ssh_public(self.node.public_key()).encode() + b"\n")
            write_secret(folder / SUPEREXEC_SECRET, secrets.token_bytes(32))

    def public(self, name: str) -> PublicBundle:
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        request = x509.CertificateSigningRequestBuilder().subject_name(subject).sign(self.tls, hashes.SHA256())
        csr = request.public_bytes(serialization.Encoding.PEM).decode()
        node = _ssh_public(self.node.public_key())
        return PublicBundle(name=name, identity=self.identity.public, node=node, csr=csr)


def keygen(name: str, out: Path, role: Role = "site") -> Path:
    """Make a party's keys in a directory; gives the one file that may leave it."""
    require_name(name)
    taken = [file for file in (*SECRETS[role], f"{name}.public.json") if (out / file).exists()]
    if taken:
        raise UsageError(f"{out / taken[0]} exists already; a key is never overwritten. Choose another --out")
    out.mkdir(mode=0o700, parents=True, exist_ok=True)
    out.chmod(0o700)
    keys = PartyKeys.generate()
    keys.save(out, role)
    bundle = out / f"{name}.public.json"
    write_file(bundle, (keys.public(name).model_dump_json(indent=1) + "\n").encode())
    return bundle


def require_name(name: str) -> None:
    if not re.fullmatch(NAME, name) or name.endswith("\n") or name.lower() in RESERVED:
        raise UsageError(
            f"{name!r} is no name for a party: letters, digits, - and _, at most 63, and not {' or '.join(RESERVED)}"
        )


def load_bundle(path: Path, name: str) -> PublicBundle:
    """A party's bundle, with everything in it checked."""
    try:
        content = path.read_bytes()
        if len(content) > MOST_BYTES:
            raise ValueError("too large for a bundle of public keys")
        value = json.loads(content)
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file. The party makes it with: fedplat site keygen {name}") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: not a public bundle: {error}") from None
    bundle = validated(PublicBundle, value, path)
    if bundle.name != name:
        raise UsageError(f"{path}: these are the keys of '{bundle.name}', not of '{name}'")
    try:
        bundle.tls_public_key()
        bundle.node_public()
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None
    return bundle


def private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _ssh_private(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )


def _ssh_public(key: ec.EllipticCurvePublicKey) -> str:
    return key.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH).decode()
