"""The certificate of a site's own link: the loopback proxy between its SuperNode and the server.

Flower's SuperNode can't present a client certificate, and refuses to authenticate itself over anything but TLS. So it
speaks TLS to a proxy on loopback, which adds the site's certificate. The proxy's certificate is self-signed and made
beside the site's keys: only this site's SuperNode trusts it, and nobody else's CA can speak for it.
"""

import datetime
import ipaddress

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

VALID = datetime.timedelta(days=20 * 365)


def self_signed_for_loopback(key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    now = datetime.datetime.now(datetime.UTC)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fedplat site link")])
    addresses = [x509.IPAddress(ipaddress.ip_address(address)) for address in ("127.0.0.1", "::1")]
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    return (
        builder.not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + VALID)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), True)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost"), *addresses]), False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), False)
        .sign(key, hashes.SHA256())
    )
