"""Is the server there, is it ours, and does its clock agree? One TLS connection with the kit's own certificate answers.

Clocks matter: Flower's node authentication is a signed time that the SuperLink refuses when it is minutes away, and
signed jobs have a time window.
"""

import datetime
import email.utils
import http.client
import ssl
from dataclasses import dataclass
from pathlib import Path

TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Answer:
    status: int
    clock_ahead_s: float | None
    """How far this machine's clock is ahead of the server's; None if the server told no time."""


def client_context(ca: Path, certificate: Path | None = None, key: Path | None = None) -> ssl.SSLContext:
    """TLS that trusts this consortium's CA and nobody else."""
    context = ssl.create_default_context(ssl.Purpose.SERVER_AUTH, cafile=str(ca))
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if certificate is not None:
        context.load_cert_chain(certificate, key)
    return context


def ask_front(host: str, port: int, path: str, context: ssl.SSLContext, timeout_s: float = TIMEOUT_S) -> Answer:
    """Ask in a way that the front itself refuses: how it does tells who we are to it, and the time."""
    connection = http.client.HTTPSConnection(host, port, timeout=timeout_s, context=context)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        response.read()
        return Answer(response.status, _clock_ahead(response.getheader("Date")))
    except http.client.HTTPException as error:
        raise ConnectionError(f"not an HTTP server: {error!r}") from None
    finally:
        connection.close()


def _clock_ahead(date: str | None) -> float | None:
    """HTTP dates have whole seconds: less than one second of difference is none."""
    try:
        told = email.utils.parsedate_to_datetime(date or "")
    except ValueError:
        return None
    ahead = (datetime.datetime.now(datetime.UTC) - told).total_seconds()
    return 0.0 if 0 <= ahead < 1.5 else ahead
