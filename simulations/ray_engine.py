"""Flower's own simulation runtime on Ray: the same job, driver and client code, past one machine.

Here Flower brings the Grid, so this is not an engine behind LocalGrid but another way to get a Grid. The model has
the same bits as with the serial and process engines, because the mean doesn't depend on the order of replies.
"""

import importlib.util
import os
import threading
import warnings
from collections.abc import Callable, Iterable
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid, ServerApp

from client_app.handler import handle_evaluate, handle_hello, handle_train
from fedplat.errors import UsageError
from fedplat.flower import new_context
from fedplat.job import Job
from fedplat.wire import JOB_KEY
from server_app.cohort import CohortGrid

QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "FLWR_TELEMETRY_ENABLED": "0", "RAY_DISABLE_IMPORT_WARNING": "1"}


def require_ray(job: Job) -> None:
    """Say what is missing or not possible, before anything starts."""
    if importlib.util.find_spec("ray") is None:
        raise UsageError("engine ray needs Ray: pip install 'fedplat[ray]' (or choose --engine process)")
    if job.uses_client_state:
        raise UsageError("engine ray can't checkpoint what clients remember: choose --engine process")
    if job.privacy is not None:
        raise UsageError("engine ray has no ledger for private clients: choose --engine vector or process")
    if any(job.simulation.faults.model_dump().values()):
        raise UsageError("simulation.faults needs one of the engines serial, vector, process")


def run_on_ray(job: Job, drive: Callable[[Grid], None]) -> None:
    """Give `drive` a Grid whose clients are Ray actors; whatever it raises is raised here."""
    require_ray(job)
    os.environ.update(QUIET)
    from flwr.simulation import run_simulation

    stop, problems = threading.Event(), []
    server_app = ServerApp()

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        try:
            drive(StoppableGrid(grid, stop))
        except BaseException as problem:  # it crosses a thread of Flower's, which would lose its type
            problems.append(problem)

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run_simulation(server_app, ray_client_app(job.canonical()), job.cohort.clients, "ray", _backend(job))
    finally:
        stop.set()
    if problems:
        raise problems[0]


def _backend(job: Job) -> Any:
    workers = job.simulation.workers or os.cpu_count() or 1
    init = {"num_cpus": workers, "include_dashboard": False}
    return {"init_args": init, "client_resources": {"num_cpus": 1, "num_gpus": 0.0}}


def ray_client_app(canonical_job: str) -> ClientApp:
    """The plain ClientApp with the job bound to it: this runtime has no run config."""
    app = ClientApp()

    def bound(handle: Callable[[Message, Context], Message]) -> Callable[[Message, Context], Message]:
        def call(message: Message, context: Context) -> Message:
            # A copy: Flower refuses a context whose run config was changed.
            with_job = new_context(context.run_id, context.node_id, dict(context.node_config), {JOB_KEY: canonical_job})
            return handle(message, with_job)

        return call

    app.train()(bound(handle_train))
    app.evaluate()(bound(handle_evaluate))
    app.query("hello")(bound(handle_hello))
    return app


class StoppableGrid(CohortGrid):
    """Flower's Grid, which gives up waiting for replies once its runtime has ended."""

    def __init__(self, grid: Grid, stop: threading.Event) -> None:
        super().__init__(grid, ())
        self._stop = stop

    def get_node_ids(self) -> Iterable[int]:
        return self._grid.get_node_ids()

    def get_nodes(self) -> Iterable[NodeInfo]:
        return self._grid.get_nodes()

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        if self._stop.is_set():
            raise KeyboardInterrupt
        return super().pull_messages(list(message_ids))

    def _within(self, messages: Iterable[Message]) -> list[Message]:
        return list(messages)
