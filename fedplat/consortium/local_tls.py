"""A certificate for this machine's own loopback, made anew at every start and trusted by nobody else.

Flower's processes and ours talk over 127.0.0.1. TLS there keeps another local user from listening, or from standing in
for a process that is down.
"""

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from fedplat.files import write_file

VALID_DAYS = 3650


@dataclass(frozen=True)
class LocalTls:
    certificate: Path
    key: Path

    @classmethod
    def create(cls, folder: Path) -> "LocalTls":
        """Write local.crt and local.key (0600) into a folder."""
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fedplat loopback")])
        now = datetime.datetime.now(datetime.UTC)
        names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        certificate = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(days=VALID_DAYS))
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .sign(key, hashes.SHA256())
        )
        made = cls(folder / "local.crt", folder / "local.key")
        pem = serialization.Encoding.PEM
        private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        write_file(made.key, private, mode=0o600)
        write_file(made.certificate, certificate.public_bytes(pem))
        return made
