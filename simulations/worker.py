"""A worker process: runs ClientApp messages that its parent sends over a pipe, one model resident.

Everything that crosses the pipe is between processes of one user on one machine, started by this program.
"""

import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch
from flwr.app import Context, Message, RecordDict
from flwr.app.metadata import Metadata
from flwr.clientapp import ClientApp

from client_app.handler import Handler, install_handler
from fedplat.flower import become_server, message_with
from fedplat.job import Job
from fedplat.task import Examples
from simulations.engine import Delivery, run_client
from simulations.shared_model import ModelReader, ModelReference


@dataclass(frozen=True)
class WorkerSetup:
    """What a worker needs to begin: where its ClientApp comes from, and the job's data in shared memory."""

    load_app: Callable[[], ClientApp]
    job: str | None
    examples: Examples | None
    device: int | None
    run_id: int


@dataclass(frozen=True)
class Assignment:
    """One client's message without its arrays, and where those are."""

    message_id: str
    metadata: Metadata
    content: RecordDict
    model: ModelReference
    context: Context
    crash: bool = False


@dataclass(frozen=True)
class Outcome:
    """A client's reply, and what it now remembers."""

    message_id: str
    reply: Message
    state: RecordDict


def work(pipe: Connection, setup: WorkerSetup, inherited: Sequence[Connection] = ()) -> None:
    """Serve assignments until the parent closes the pipe, or dies."""
    for other in inherited:
        other.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    if setup.device is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(setup.device)
    become_server(setup.run_id)
    client_app = setup.load_app()
    if setup.job is not None:
        install_handler(setup.job, Handler(Job.from_canonical(setup.job), setup.examples))
    reader = ModelReader()
    while True:
        try:
            assignments: list[Assignment] = pipe.recv()
            for assignment in assignments:
                outcome = _serve(client_app, reader, assignment)
                pipe.send(outcome)
        except (EOFError, BrokenPipeError, ConnectionResetError):
            return  # the parent is gone


def _serve(client_app: ClientApp, reader: ModelReader, assignment: Assignment) -> Outcome:
    if assignment.crash:
        os._exit(1)  # a fault on purpose: die as the OOM killer would have it
    content = RecordDict({**assignment.content, **reader.fetch(assignment.model)})
    message = message_with(content, assignment.metadata)
    done = run_client(client_app, Delivery(message, assignment.context))
    return Outcome(assignment.message_id, done.reply, assignment.context.state)


def fedplat_client_app() -> ClientApp:
    """Our own ClientApp: the handler of the job."""
    from client_app.app import app

    return app
