"""The site agent: the SuperNode's executor, and the only process at a site that sees data, keys and ledger.

    SuperLink ⇄ SuperNode (transport only) ⇄ agent (this)

It asks the SuperNode for tasks, and answers with the site's own installed code. What the run brings is a signed job and
arrays; the uploaded archive is never opened. For each request: signature → policy → strict reading → the durable record
→ budget reserved → training → reply on disk → budget committed → reply sent. A kill at any point leaves a state from
which the same request goes on, for the same price.
"""

import contextlib
import logging
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from flwr.app import ConfigRecord, Message, RecordDict

from client_app.admission import admitted, sole_owner
from client_app.audit_log import AuditLog
from client_app.handler import Handler, handler_for
from client_app.policy import own_client, require_allowed, require_hours, require_strength
from client_app.replies import ReplyStore
from client_app.requests import EXTRA_BYTES, most_bytes, most_objects, read_request
from client_app.site_lock import lock_ledger
from client_app.site_memory import SiteMemory
from client_app.spending import admit_job, spending
from client_app.statements import NotYet, Statements
from fedplat import wire
from fedplat.consortium.identity import SigningKey
from fedplat.consortium.roster_file import RosterFile
from fedplat.consortium.signed_job import SignedJob
from fedplat.errors import FedplatError, UsageError
from fedplat.files import exclusive
from fedplat.flower.tasks import CLIENT_TASK, Assignment, ClientTask, MessageLost, RuntimeApi, TaskLost, TaskQueue
from fedplat.job import Job
from fedplat.packing import is_packed, pack, unpack
from fedplat.polling import Patience
from fedplat.wire import Identity
from privacy import plan_of
from privacy.site_budgets import ENVIRONMENT, load_site
from privacy.site_policy import PolicyRefusal

if TYPE_CHECKING:
    from fedplat.consortium.kit_files import SiteKit

logger = logging.getLogger(__name__)
FIRST_POLL_S, LONGEST_POLL_S = 0.02, 0.5
CONSIDER, ADMIT = "query.consider", "query.admit"
MOST_TRIES = 2
FEW_OBJECTS = 64
"""Parts that a message without arrays has at most."""


class Agent:
    """One site's agent. It serves one request at a time."""

    def __init__(self, kit: "SiteKit") -> None:
        self._kit, self._site = kit, load_site(kit.site_file)
        os.environ[ENVIRONMENT] = str(kit.site_file)  # the door and the ledger of this process
        self._state = kit.state_folder
        self._state.mkdir(mode=0o700, exist_ok=True)
        lock = exclusive(self._state / "agent.lock", "another agent serves this site")
        self._locks = lock, lock_ledger(self._site)
        self._roster = RosterFile(kit.roster, kit.authority)
        self._audit = AuditLog(self._state / "audit.jsonl")
        self._replies = ReplyStore(self._state / "replies")
        self._memory = SiteMemory(self._state / "memory")
        self._statements = Statements(self._site, SigningKey.load(kit.identity), self._state / "heads.json")
        self._task_file = self._state / "task.json"
        self._strong: set[str] = set()
        address, certificate = f"127.0.0.1:{kit.node_port}", kit.local_certificate.read_bytes()
        self._api = RuntimeApi(address, certificate, kit.superexec_secret.read_bytes())
        if kit.name != self._site.name:
            raise UsageError(f"{kit.site_file}: is the file of site '{self._site.name}', this kit is of '{kit.name}'")

    def run(self) -> None:
        """Serve until the process is told to stop."""
        self._audit.note("started", about={"site": self._site.name, "roster": self._roster.current.version})
        self._go_on()
        queue, patience = TaskQueue(self._api, CLIENT_TASK), Patience(FIRST_POLL_S, LONGEST_POLL_S)
        try:
            while True:
                token = queue.acquire()
                if token is None:
                    time.sleep(patience.pause_s())
                else:
                    self._take(token)
                    patience.restart()
        finally:
            queue.close()
            self._audit.note("stopped")

    # --- one task -------------------------------------------------------------------------------

    def _take(self, token: str) -> None:
        with ClientTask(self._api, token) as task:
            try:
                assignment = task.pull_assignment()
            except TaskLost as error:
                logger.warning("%s", error)
                return
            assignment.save(self._task_file)
            self._serve(task, assignment)

    def _go_on(self) -> None:
        """A task that was being worked on when this process was killed is still ours, for a minute."""
        assignment = Assignment.load(self._task_file)
        if assignment is None:
            return
        assignment = replace(assignment, tries=assignment.tries + 1)
        assignment.save(self._task_file)
        with ClientTask(self._api, assignment.token) as task:
            if task.is_ours():
                task.go_on(assignment)
                self._serve(task, assignment)
            else:
                self._task_file.unlink(missing_ok=True)

    def _serve(self, task: ClientTask, assignment: Assignment) -> None:
        try:
            task.answer(assignment, self._answer(task, assignment))
        except Exception as error:  # the SuperNode restarted, or the run was stopped: the server will ask again
            logger.warning("the reply could not be handed to the SuperNode: %s: %s", type(error).__name__, error)
        self._task_file.unlink(missing_ok=True)

    def _answer(self, task: ClientTask, assignment: Assignment) -> Message:
        """The reply to a message: an update, or a refusal in words."""
        message, packed = assignment.empty_message(), False
        kind = message.metadata.message_type
        try:
            if assignment.tries > MOST_TRIES:
                raise UsageError("this request has ended the site's agent before: it is not tried again")
            job = self._allowed_job(assignment)
            if kind == ADMIT:
                message = task.pull_message(assignment, FEW_OBJECTS, EXTRA_BYTES)
                packed = _unpack(message)
                content = self._admit(message, job)
            else:
                handler = self._handler(job)
                expected = handler.expected()
                message = task.pull_message(assignment, most_objects(expected), most_bytes(expected))
                packed = _unpack(message)
                content = self._respond(message, handler)
        except (NotYet, MessageLost) as reason:
            content = _again(str(reason))
        except FedplatError as error:
            self._audit.note("refused", str(error)[:500], {"kind": kind})
            task.await_message(assignment)
            content = _refused(str(error))
        except Exception:
            logger.exception("request failed")
            self._audit.note("failed", "an error that is in the site's own log", {"kind": kind})
            task.await_message(assignment)
            content = _refused("the site could not serve this request: the reason is in its own log")
        content = self._with_statement(content)
        return Message(pack(content) if packed else content, reply_to=message)  # answered as it was asked

    def _allowed_job(self, assignment: Assignment) -> Job:
        """The job that the run carries, if an operator signed it and the site's rules allow it."""
        signed = SignedJob.parse(str(assignment.run_config.get(wire.JOB_KEY, "")))
        job = signed.verified(self._roster.newest())
        require_allowed(self._site, signed, job, known=self._replies.knows(job.digest))
        return job

    def _admit(self, message: Message, job: Job) -> RecordDict:
        """Reserve a whole job before anybody is sampled for it. Loads nothing."""
        self._hear(message.content)
        identity = Identity(job.digest, 0, 1, self._client(job))
        require_strength(self._site, plan_of(job))
        admit_job(job, identity)
        self._audit.note("admitted", "the whole job", {"job": job.digest, "kind": "admit"})
        return RecordDict({wire.IDENTITY: identity.record()})

    def _respond(self, message: Message, handler: Handler) -> RecordDict:
        kind = message.metadata.message_type
        self._hear(message.content)
        if kind == CONSIDER:
            self._consider(handler)
            return RecordDict({wire.IDENTITY: ConfigRecord({"client": self._client(handler.job)})})
        if kind not in ("train", "evaluate"):
            raise UsageError(f"this site answers no '{kind:.30}' messages")
        require_hours(self._site)
        self._statements.require_witnesses(self._roster.newest())
        identity, digest = read_request(message, handler.job, self._client(handler.job), handler.expected())
        return self._release(handler, identity, digest, message.content, "train" if kind == "train" else "evaluate")

    # --- one release ----------------------------------------------------------------------------

    def _release(
        self, handler: Handler, identity: Identity, digest: str, content: RecordDict, kind: Literal["train", "evaluate"]
    ) -> RecordDict:
        about: dict[str, str | int] = {
            "job": identity.job,
            "round": identity.round,
            "attempt": identity.attempt,
            "kind": kind,
        }
        known = self._replies.begin(identity, kind, digest)
        if known is not None:
            self._audit.note("repeated", "the same request, the same reply", about)
            return known
        self._require_evaluations(handler, kind)
        self._audit.note("admitted", about=about)
        rows = handler.data.rows(identity.client)
        size = len(rows.train) + len(rows.holdout)
        reply = self._replies.kept(identity, kind)
        kept = reply is not None
        with spending(handler.job, handler.plan, identity, None, kind, size, alone=True, kept=kept):
            if reply is None:
                memory = self._memory.recall(handler.job)
                with _at_most(self._site.policy.max_seconds):
                    compute = handler.train if kind == "train" else handler.evaluate
                    reply = compute(content, identity, memory)
                self._memory.save(handler.job, memory)
                self._replies.write(identity, kind, reply)
        self._replies.settle(identity, kind)
        self._audit.note("released", about=about)
        return reply

    def _require_evaluations(self, handler: Handler, kind: str) -> None:
        most = self._site.policy.max_evaluations
        if kind == "evaluate" and handler.plan is None and self._replies.count(handler.digest, "evaluate") > most:
            raise PolicyRefusal("max_evaluations", f"this site evaluates {most} times for one job")

    def _consider(self, handler: Handler) -> None:
        """Would a first round be served now? Everything is checked that costs nothing."""
        if handler.plan is not None:
            self._statements.require_budget(handler.job, handler.plan)

    def _client(self, job: Job) -> str:
        return own_client(job, self._site.name)

    def _handler(self, job: Job) -> Handler:
        """The warm handler of a job that is allowed here."""
        if job.digest not in self._strong:
            require_strength(self._site, plan_of(job))
            self._strong.add(job.digest)
        with admitted(job, Identity(job.digest, 1, 1)):
            return handler_for(job.canonical(), sole_owner(job, self._client(job)))

    # --- statements -----------------------------------------------------------------------------

    def _hear(self, content: RecordDict) -> None:
        record = wire.records(content, ConfigRecord).get(wire.PEERS)
        if record is None:
            return
        if self._roster.offer(str(record.get("roster", ""))):
            self._audit.note("roster", f"version {self._roster.current.version}")
            raise NotYet("a newer roster: this request is judged by it when it comes again")
        told = record.get("statements", [])
        for alarm in self._statements.hear(told if isinstance(told, list) else [], self._roster.newest()):
            self._audit.note("alarm", alarm)

    def _with_statement(self, content: RecordDict) -> RecordDict:
        try:
            content[wire.SITE] = ConfigRecord({"statement": self._statements.make(self._audit.head)})
        except FedplatError as error:  # a ledger that can't be read: the refusal says so, and still leaves
            logger.error("%s", error)
        return content


def _unpack(message: Message) -> bool:
    """Let a message's content be as if it had come unpacked; returns whether it had not."""
    packed = is_packed(message.content)
    try:
        message.content = unpack(message.content)
    except ValueError as error:
        raise UsageError(f"the request can't be read: {error}") from None
    return packed


def _refused(reason: str) -> RecordDict:
    return RecordDict({wire.REFUSED: ConfigRecord({"reason": reason})})


def _again(reason: str) -> RecordDict:
    return RecordDict({wire.AGAIN: ConfigRecord({"reason": reason})})


@contextlib.contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    """Stop a computation that takes longer than the site allows."""

    def stop(number: int, frame: object) -> None:
        raise PolicyRefusal("max_seconds", f"the request took more than the {seconds:g} s that this site allows")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
