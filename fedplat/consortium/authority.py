"""The consortium's authority: its own CA, and the Ed25519 key that signs rosters.

The CA vouches for this consortium and nothing else: it can make no further CA (path length 0), and a client's
certificate can't pass for a server's. What a certificate says of a party (its name, its role) is what consortium.toml
says, never what a certificate request asks for. Its two private keys stay in the authority's own directory.
"""

import datetime
import ipaddress
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedplat.consortium.identity import SigningKey, require_private, write_secret
from fedplat.consortium.keygen import private_pem
from fedplat.consortium.spec import Role, is_address
from fedplat.errors import UsageError
from fedplat.files import sync_directory, write_file

CA_KEY, CA_CERTIFICATE, AUTHORITY_KEY = "ca.key", "ca.crt", "authority.key"
CA_DAYS = 20 * 365
SKEW = datetime.timedelta(minutes=5)
"""A certificate is valid from a little earlier: clocks differ."""
LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")
"""Names under which the server's own processes reach its SuperLink."""


@dataclass(frozen=True)
class Authority:
    folder: Path
    consortium: str
    certificate: x509.Certificate
    signing: SigningKey
    _ca_key: ec.EllipticCurvePrivateKey

    @classmethod
    def create(cls, folder: Path, consortium: str) -> "Authority":
        """Make the keys of a new consortium: all of the directory, or none of it."""
        partial = folder.with_name(f".{folder.name}.part")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(mode=0o700, parents=True)
        ca_key, signing = ec.generate_private_key(ec.SECP256R1()), SigningKey.generate()
        write_secret(partial / CA_KEY, private_pem(ca_key))
        signing.save(partial / AUTHORITY_KEY)
        write_file(partial / CA_CERTIFICATE, pem(_self_signed(ca_key, consortium)))
        partial.rename(folder)
        sync_directory(folder.parent)
        return cls.load(folder, consortium)

    @classmethod
    def load(cls, folder: Path, consortium: str) -> "Authority":
        certificate = load_certificate(folder / CA_CERTIFICATE)
        owner = _attribute(certificate, NameOID.ORGANIZATION_NAME)
        if owner != consortium:
            raise UsageError(
                f"{folder}: this is the authority of consortium '{owner}', not of '{consortium}'. "
                "A consortium keeps its name; give another --out for a new one"
            )
        return cls(folder, consortium, certificate, SigningKey.load(folder / AUTHORITY_KEY), _load_ca_key(folder))

    @property
    def public(self) -> str:
        """The key that verifies rosters, in hex."""
        return self.signing.public

    def issue_server(
        self, key: ec.EllipticCurvePublicKey, names: Sequence[str], days: int, now: datetime.datetime | None = None
    ) -> x509.Certificate:
        """A certificate for the server under all its names, and for its own processes on loopback."""
        builder = self._leaf(key, names[0], "server", days, now)
        alternatives = x509.SubjectAlternativeName([_general_name(name) for name in server_names(names)])
        return self._sign(builder.add_extension(alternatives, False), ExtendedKeyUsageOID.SERVER_AUTH)

    def issue_client(
        self, key: ec.EllipticCurvePublicKey, name: str, role: Role, days: int, now: datetime.datetime | None = None
    ) -> x509.Certificate:
        """A certificate by which the front knows a site or an operator."""
        return self._sign(self._leaf(key, name, role, days, now), ExtendedKeyUsageOID.CLIENT_AUTH)

    def _leaf(
        self, key: ec.EllipticCurvePublicKey, name: str, unit: str, days: int, now: datetime.datetime | None
    ) -> x509.CertificateBuilder:
        now = now or datetime.datetime.now(datetime.UTC)
        subject = _subject(self.consortium, name[:64], unit)
        end = min(now + datetime.timedelta(days=days), self.certificate.not_valid_after_utc)
        builder = _builder(subject, self.certificate.subject, key, now - SKEW, end)
        return builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), True)

    def _sign(self, builder: x509.CertificateBuilder, usage: x509.ObjectIdentifier) -> x509.Certificate:
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._ca_key.public_key())
        builder = builder.add_extension(_key_usage(ca=False), True).add_extension(issuer, False)
        return builder.add_extension(x509.ExtendedKeyUsage([usage]), False).sign(self._ca_key, hashes.SHA256())


def server_names(names: Sequence[str]) -> list[str]:
    return list(dict.fromkeys([*names, *LOCAL_NAMES]))


def serial_text(certificate: x509.Certificate) -> str:
    """The serial number as nginx prints `$ssl_client_serial`: whole bytes, upper case."""
    digits = f"{certificate.serial_number:X}"
    return digits if len(digits) % 2 == 0 else f"0{digits}"


def pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def load_certificate(path: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except FileNotFoundError:
        raise UsageError(f"{path}: no such certificate. It is part of the kit that `fedplat provision` made") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: can't be read as a certificate: {error}") from None


def _load_ca_key(folder: Path) -> ec.EllipticCurvePrivateKey:
    path = folder / CA_KEY
    try:
        require_private(path)
        key = serialization.load_pem_private_key(path.read_bytes(), password=None)
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: can't be read as a private key: {error}") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise UsageError(f"{path}: not an EC key")
    return key


def _self_signed(key: ec.EllipticCurvePrivateKey, consortium: str) -> x509.Certificate:
    now = datetime.datetime.now(datetime.UTC)
    subject = _subject(consortium, "authority", "authority")
    builder = _builder(subject, subject, key.public_key(), now - SKEW, now + datetime.timedelta(days=CA_DAYS))
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), True)
    return builder.add_extension(_key_usage(ca=True), True).sign(key, hashes.SHA256())


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    start: datetime.datetime,
    end: datetime.datetime,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder(issuer, subject, key, x509.random_serial_number(), start, end)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), False)
    )  # fmt: skip


def _subject(consortium: str, name: str, unit: str) -> x509.Name:
    return x509.Name(
        [
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, consortium),
            x509.NameAttribute(NameOID.ORGANIZATIONAL_UNIT_NAME, unit),
            x509.NameAttribute(NameOID.COMMON_NAME, name),
        ]
    )


def _attribute(certificate: x509.Certificate, oid: x509.ObjectIdentifier) -> str:
    found = certificate.subject.get_attributes_for_oid(oid)
    return str(found[0].value) if found else ""


def _general_name(name: str) -> x509.GeneralName:
    return x509.IPAddress(ipaddress.ip_address(name)) if is_address(name) else x509.DNSName(name)


def _key_usage(ca: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not ca,
        key_cert_sign=ca,
        crl_sign=ca,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
