"""An operator's side of Flower's Control API, over TLS with a client certificate.

Flower's own command line can't present one. A run is started with an empty archive: what is to be done travels as
one string in the run config, the signed job.
"""

import hashlib
import io
import ssl
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
from flwr.common.serde import fab_to_proto, user_config_to_proto
from flwr.proto.control_pb2 import (
    ListNodesRequest,
    ListRunsRequest,
    RegisterNodeRequest,
    StartRunRequest,
    StopRunRequest,
    StreamLogsRequest,
    UnregisterNodeRequest,
)
from flwr.supercore.control.control_http_client import ControlHttpClient
from flwr.supercore.fab import Fab
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor

from fedplat.errors import JobError, UsageError
from fedplat.flower import require_checked_version

JOB_KEY, ACTION_KEY = "job", "action"
_APP = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "fedplat-signed-job"
version = "1.0.0"
dependencies = []
[tool.flwr.app]
publisher = "fedplat"
[tool.flwr.app.components]
serverapp = "fedplat_signed_job:server"
clientapp = "fedplat_signed_job:client"
[tool.flwr.app.config]
job = ""
action = ""
"""


@dataclass(frozen=True)
class Credentials:
    """What an operator shows to the server, and what the server must show."""

    certificate: Path
    key: Path
    authority: Path

    def context(self) -> ssl.SSLContext:
        try:
            context = ssl.create_default_context(cafile=str(self.authority))
            context.load_cert_chain(str(self.certificate), str(self.key))
        except (OSError, ssl.SSLError) as error:
            raise UsageError(f"{self.certificate.parent}: certificates can't be used: {error}") from None
        return context


@dataclass(frozen=True)
class RunStatus:
    run_id: int
    status: str
    """pending, starting, running, or finished with how: finished:completed, finished:failed, finished:stopped."""
    details: str
    job: str
    action: str


@dataclass(frozen=True)
class NodeStatus:
    node_id: int
    name: str
    status: str
    last_activated_at: str
    online_until: float
    public_key: bytes


class Control:
    """One connection to a SuperLink's Control API. Errors say what happened in words."""

    def __init__(self, address: str, context: ssl.SSLContext, timeout_s: float = 30.0) -> None:
        require_checked_version()
        self._address = address
        self._client = ControlHttpClient(
            f"https://{address}",
            interceptors=[RuntimeVersionHttpInterceptor(component_name="flwr CLI")],
            verify=context,
            timeout=timeout_s,
        )

    def close(self) -> None:
        self._client.close()

    def __enter__(self) -> "Control":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start_run(self, job: str, action: str = "", archive: bytes | None = None) -> int:
        """Start a run of a signed job. `action` says what to do with it other than train: see `server_app.executor`.

        No party of ours ever opens the archive; Flower wants one.
        """
        archive = empty_archive() if archive is None else archive
        fab = Fab(hashlib.sha256(archive).hexdigest(), archive, {})
        config = user_config_to_proto({JOB_KEY: job, ACTION_KEY: action})
        with self._in_words():
            run_id = self._client.StartRun(StartRunRequest(fab=fab_to_proto(fab), override_config=config)).run_id
        if not run_id:
            raise JobError(f"{self._address}: the server did not accept the run")
        return int(run_id)

    def stop_run(self, run_id: int) -> bool:
        with self._in_words():
            return bool(self._client.StopRun(StopRunRequest(run_id=run_id)).success)

    def runs(self, run_id: int | None = None) -> list[RunStatus]:
        """All runs, oldest first, or one."""
        with self._in_words():
            request = ListRunsRequest() if run_id is None else ListRunsRequest(run_id=run_id)
            try:
                response = self._client.ListRuns(request)
            except httpx.HTTPStatusError as error:
                if error.response.status_code != httpx.codes.NOT_FOUND:
                    raise
                return []
        found = []
        for run in sorted(response.run_dict.values(), key=lambda run: str(run.pending_at)):
            status = f"{run.status.status}:{run.status.sub_status}" if run.status.sub_status else run.status.status
            config = run.override_config
            job, action = (config[key].string if key in config else "" for key in (JOB_KEY, ACTION_KEY))
            found.append(RunStatus(int(run.run_id), status, run.status.details, job, action))
        return found

    def logs(self, run_id: int, after: float = 0.0) -> Iterator[tuple[str, float]]:
        """The run's log as it is written, with the time up to which it has been read."""
        with self._in_words():
            for response in self._client.StreamLogs(StreamLogsRequest(run_id=run_id, after_timestamp=after)):
                yield response.log_output, response.latest_timestamp

    def nodes(self) -> list[NodeStatus]:
        with self._in_words():
            response = self._client.ListNodes(ListNodesRequest())
        return [
            NodeStatus(n.node_id, n.name, n.status, n.last_activated_at, n.online_until, n.public_key)
            for n in response.nodes_info
        ]

    def register_node(self, public_key: bytes, name: str) -> None:
        with self._in_words():
            self._client.RegisterNode(RegisterNodeRequest(public_key=public_key, name=name))

    def unregister_node(self, node_id: int) -> None:
        with self._in_words():
            self._client.UnregisterNode(UnregisterNodeRequest(node_id=node_id))

    def _in_words(self) -> "_Words":
        return _Words(self._address)


class _Words:
    """Turns what HTTP says into what a person can act on."""

    def __init__(self, address: str) -> None:
        self._address = address

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, httpx.HTTPStatusError):
            code = error.response.status_code
            if code in (400, 403):
                raise UsageError(
                    f"{self._address}: refused ({code}): your certificate may not do this, was revoked, or is not of "
                    "this consortium. Check your kit with: fedplat doctor KIT"
                ) from None
            raise JobError(f"{self._address}: answered {code}: {error.response.text[:300]}") from None
        if isinstance(error, httpx.TransportError):
            raise JobError(
                f"{self._address}: can't be reached ({error or type(error).__name__}). Is the server running? "
                "Check with: fedplat doctor KIT"
            ) from None


def empty_archive() -> bytes:
    """The smallest Flower app: it has a name and no code."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        manifest = f"pyproject.toml,{hashlib.sha256(_APP.encode()).hexdigest()},{len(_APP.encode()) * 8}\n"
        for name, text in (("pyproject.toml", _APP), (".info/CONTENT", manifest)):
            archive.writestr(zipfile.ZipInfo(name), text)
    return content.getvalue()
