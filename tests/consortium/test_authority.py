"""Certificates: whom they vouch for, for what, and to whom."""

import datetime
import ipaddress
import itertools
import shutil
import subprocess
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from cryptography.x509.verification import ExtensionPolicy, PolicyBuilder, Store, VerificationError

from fedplat.consortium.authority import Authority, load_certificate, serial_text
from fedplat.errors import UsageError
from tests.consortium.conftest import Consortium

CLIENTS = {"north": "site", "south": "site", "olga": "operator"}


def _verify_client(ca: x509.Certificate, certificate: x509.Certificate) -> None:
    """As a web server would, but for the subject's alternative names, which a party has none of."""
    policy = (
        PolicyBuilder()
        .store(Store([ca]))
        .extension_policies(ca_policy=ExtensionPolicy.webpki_defaults_ca(), ee_policy=ExtensionPolicy.permit_all())
    )
    policy.build_client_verifier().verify(certificate, [])


@pytest.fixture
def other(tmp_path: Path) -> Consortium:
    made = Consortium(tmp_path / "beta", name="alpha")  # even under the same name
    made.provision()
    return made


def test_every_client_certificate_is_its_own_consortium_s_alone(consortium: Consortium, other: Consortium) -> None:
    for mine, theirs in ((consortium, other), (other, consortium)):
        ca, foreign = (load_certificate(c.kits / "authority" / "ca.crt") for c in (mine, theirs))
        for name in CLIENTS:
            certificate = load_certificate(mine.kit(name) / "tls.crt")
            _verify_client(ca, certificate)
            with pytest.raises(VerificationError):
                _verify_client(foreign, certificate)


def test_openssl_agrees_and_keeps_clients_from_being_servers(consortium: Consortium) -> None:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is not installed")

    def verified(certificate: Path, purpose: str) -> bool:
        ca = str(consortium.kits / "authority" / "ca.crt")
        command = [openssl, "verify", "-x509_strict", "-CAfile", ca, "-purpose", purpose, str(certificate)]
        return subprocess.run(command, capture_output=True).returncode == 0

    server = consortium.kits / "server" / "server.crt"
    assert verified(server, "sslserver") and not verified(server, "sslclient")
    for name in CLIENTS:
        own = consortium.kit(name) / "tls.crt"
        assert verified(own, "sslclient") and not verified(own, "sslserver")


def test_a_client_certificate_says_who_and_what(consortium: Consortium) -> None:
    for name, role in CLIENTS.items():
        certificate = load_certificate(consortium.kit(name) / "tls.crt")
        said = {a.oid: a.value for a in certificate.subject}
        assert said == {
            NameOID.COMMON_NAME: name,
            NameOID.ORGANIZATIONAL_UNIT_NAME: role,
            NameOID.ORGANIZATION_NAME: "alpha",
        }
        usage = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
        assert list(usage) == [ExtendedKeyUsageOID.CLIENT_AUTH]
        assert not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca


def test_the_server_s_certificate_has_all_its_names(consortium: Consortium) -> None:
    certificate = load_certificate(consortium.kits / "server" / "server.crt")
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert set(names.get_values_for_type(x509.DNSName)) == {"fl.example.org", "localhost"}
    addresses = {ipaddress.ip_address("127.0.0.1"), ipaddress.ip_address("::1")}
    assert set(names.get_values_for_type(x509.IPAddress)) == addresses
    PolicyBuilder().store(Store([load_certificate(consortium.kits / "server" / "ca.crt")])).build_server_verifier(
        x509.DNSName("fl.example.org")
    ).verify(certificate, [])


def test_the_ca_can_make_no_other_ca(consortium: Consortium) -> None:
    ca = load_certificate(consortium.kits / "authority" / "ca.crt")
    limits = ca.extensions.get_extension_for_class(x509.BasicConstraints)
    assert limits.critical and limits.value.ca and limits.value.path_length == 0
    usage = ca.extensions.get_extension_for_class(x509.KeyUsage)
    assert usage.critical and usage.value.key_cert_sign and not usage.value.digital_signature


def test_no_two_certificates_share_a_serial_or_a_key(consortium: Consortium) -> None:
    files = [consortium.kit(name) / "tls.crt" for name in CLIENTS] + [consortium.kits / "server" / "server.crt"]
    certificates = [load_certificate(file) for file in files]
    for one, two in itertools.combinations(certificates, 2):
        assert one.serial_number != two.serial_number and one.public_key() != two.public_key()


@pytest.mark.parametrize(("number", "text"), [(0xABC, "0ABC"), (0x1, "01"), (0xFF, "FF"), (0x80FF, "80FF")])
def test_a_serial_is_written_as_nginx_prints_it(consortium: Consortium, number: int, text: str) -> None:
    class Numbered:
        serial_number = number

    assert serial_text(Numbered()) == text  # type: ignore[arg-type]


def test_no_certificate_outlives_the_ca(consortium: Consortium) -> None:
    authority = Authority.load(consortium.kits / "authority", "alpha")
    late = authority.certificate.not_valid_after_utc - datetime.timedelta(days=10)
    key = ec.generate_private_key(ec.SECP256R1()).public_key()
    certificate = authority.issue_client(key, "north", "site", 365, now=late)
    assert certificate.not_valid_after_utc == authority.certificate.not_valid_after_utc


def test_an_authority_does_not_change_its_consortium(consortium: Consortium) -> None:
    consortium.name = "gamma"
    before = consortium.files()
    with pytest.raises(UsageError, match="authority of consortium 'alpha'"):
        consortium.provision()
    assert consortium.files() == before
