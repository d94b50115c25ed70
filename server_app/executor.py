"""The server's executor: takes runs from the SuperLink and drives them with the installed ServerApp code.

A run is a signed job. It gets a run directory like a simulation's, so everything that reads runs works on it. What was
uploaded with it is never opened. If this process is killed it goes on with the same run when it comes back; if the
SuperLink has given the run up meanwhile (a minute without a heartbeat), it starts a new one for the same run directory.
Sites know a round by the job's identity, not by Flower's run, so they answer again with what they had computed.
"""

import contextlib
import json
import logging
import re
import ssl
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from flwr.app import Message, RecordDict

from fedplat.consortium.roster_file import RosterFile
from fedplat.consortium.signed_job import SignedJob
from fedplat.errors import FedplatError, UsageError
from fedplat.files import exclusive, write_file
from fedplat.flower import empty_run, node_key
from fedplat.flower.control import ACTION_KEY, Control
from fedplat.flower.run_grid import RunGrid
from fedplat.flower.tasks import SERVER_TASK, RunStopped, RuntimeApi, Task, TaskLost, TaskQueue
from fedplat.job import Job
from fedplat.rundir import RunDirectory, list_runs, new_run_path
from fedplat.wire import JOB_KEY
from server_app.exchange import Exchange
from server_app.run import is_finished, resume_run, start_run
from server_app.run_log import RunLog
from server_app.site_grid import SiteGrid, StatementStore

if TYPE_CHECKING:
    from fedplat.consortium.kit_files import ServerKit

logger = logging.getLogger(__name__)
CONSIDER, RESUME = "consider", "resume:"
ACTIVE = ("pending", "starting", "running")
CONSIDER_DEADLINE_S = 60.0
POLL_S = 0.2
LOOK_EVERY_S = 5.0
LOST = "No heartbeat received"
"""How Flower explains that it gave a run up."""
RUN_ID = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,200}\Z")


@dataclass(frozen=True)
class Current:
    """The run that is being driven, in a form that survives a crash."""

    token: str
    task_id: int
    run_id: int
    node_id: int
    job: str
    """The signed job."""
    action: str
    directory: str = ""

    def save(self, path: Path) -> None:
        write_file(path, json.dumps(asdict(self)).encode(), mode=0o600)

    @classmethod
    def load(cls, path: Path) -> "Current | None":
        try:
            return cls(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError):
            return None


class Executor:
    """Drives one run at a time."""

    def __init__(self, kit: "ServerKit") -> None:
        self._kit = kit
        self._lock = exclusive(kit.data_folder / "executor.lock", "another executor serves this server")
        self._roster = RosterFile(kit.roster, kit.authority)
        self._statements = StatementStore(kit.data_folder / "statements.json", self._roster)
        self._api = RuntimeApi(kit.superlink_address, kit.ca.read_bytes(), kit.superexec_secret.read_bytes())
        self._control = Control(kit.superlink_address, ssl.create_default_context(cafile=str(kit.ca)))
        self._file = kit.data_folder / "run.json"
        self._registered = 0

    def run(self) -> None:
        """Serve until the process is told to stop."""
        self._register_sites()
        self._go_on()
        queue = TaskQueue(self._api, SERVER_TASK)
        looked = time.monotonic()
        while True:
            token = queue.acquire()
            if token is not None:
                self._take(token)
                continue
            time.sleep(POLL_S)
            if time.monotonic() - looked > LOOK_EVERY_S:
                self._register_sites()
                self._recover_lost()
                looked = time.monotonic()

    # --- sites ----------------------------------------------------------------------------------

    def _register_sites(self) -> None:
        """Let the SuperLink know the roster's nodes by name, and no others."""
        roster = self._roster.refresh()
        if roster.version == self._registered:
            return
        wanted = {node_key(entry.node): name for name, entry in roster.sites.items()}
        known = {node.public_key: node for node in self._control.nodes() if node.status != "unregistered"}
        for key, node in known.items():
            if wanted.get(key) != node.name:
                self._control.unregister_node(node.node_id)
        for key, name in wanted.items():
            if key not in known or known[key].name != name:
                self._control.register_node(key, name)
        self._registered = roster.version

    # --- runs -----------------------------------------------------------------------------------

    def _take(self, token: str) -> None:
        with Task(self._api, token, "flwr-serverapp") as task:
            try:
                context, run = task.pull_input()
            except TaskLost as error:
                logger.warning("%s", error)
                return
            config = run.override_config
            current = Current(
                token,
                task.task_id,
                run.run_id,
                context.node_id,
                str(config.get(JOB_KEY, "")),
                str(config.get(ACTION_KEY, "")),
            )
            self._serve(task, current)

    def _go_on(self) -> None:
        """Continue what was being driven when this process was killed."""
        current = Current.load(self._file)
        if current is None:
            return
        if self._status(current) in ACTIVE:
            with Task(self._api, current.token, "flwr-serverapp") as task:
                task.resume(current.task_id, current.run_id, current.node_id)
                self._serve(task, current)
        else:
            self._after_loss(current)

    def _status(self, current: Current) -> str:
        found = self._control.runs(current.run_id)
        return found[0].status if found else "gone"

    def _serve(self, task: Task, current: Current) -> None:
        current.save(self._file)
        try:
            self._drive(task, current)
        except RunStopped:
            self._after_loss(Current.load(self._file) or current)
        except FedplatError as error:
            logger.warning("run %d: %s", current.run_id, error)
            self._log(task, current, f"error: {error}")
            self._file.unlink(missing_ok=True)  # first: a run that failed for a reason must not go on by itself
            task.finish(str(error))
        else:
            task.finish()
            self._file.unlink(missing_ok=True)

    def _after_loss(self, current: Current) -> None:
        """Flower has ended the run. Unless a person did, or it was over, it goes on in a new one."""
        status = self._status(current)
        if status not in ("finished:stopped", "finished:completed"):
            action = f"{RESUME}{current.directory}" if current.directory else current.action
            known = (run for run in self._control.runs() if run.run_id != current.run_id)
            if not any(run.action == action and run.job == current.job and run.status in ACTIVE for run in known):
                logger.info("run %d was lost (%s): going on in a new one", current.run_id, status)
                self._control.start_run(current.job, action)
        self._file.unlink(missing_ok=True)

    def _recover_lost(self) -> None:
        """Runs that Flower gave up while nobody knew of them: this process was killed before it had noted them."""
        runs = self._control.runs()
        for number, run in enumerate(runs):
            given_up = run.status == "finished:failed" and LOST in run.details
            if given_up and not any(later.job == run.job for later in runs[number + 1 :]):
                directory = self._unfinished(run.job)
                logger.info("run %d was lost before it was noted: going on in a new one", run.run_id)
                self._control.start_run(run.job, f"{RESUME}{directory}" if directory else run.action)

    def _unfinished(self, signed: str) -> str:
        """The newest run directory of a job that is not finished, if there is one."""
        with contextlib.suppress(FedplatError):
            digest = Job.from_canonical(SignedJob.parse(signed).job).digest
            for run in reversed(list_runs(self._kit.runs_folder)):
                if run.job().digest == digest:
                    return "" if is_finished(run) else run.id
        return ""

    def _drive(self, task: Task, current: Current) -> None:
        signed = SignedJob.parse(current.job)
        job = signed.verified(self._roster.refresh())
        require_drivable(job, self._kit.strategies, list(self._roster.current.sites))
        grid = SiteGrid(RunGrid(self._api, current.token, empty_run(current.run_id)), job, self._statements)
        if current.action == CONSIDER:
            self._consider(task, current, grid, job)
            return
        directory, exists = self._directory(current, job)
        if exists and is_finished(directory):
            return  # killed between the run's end and its report
        Current(**asdict(current) | {"directory": directory.id}).save(self._file)
        with RunLog(task, current.run_id) as log:
            log.line(f"run {directory.id}")
            try:
                if exists:
                    resume_run(grid, directory, (log,), where="flower")
                else:
                    start_run(job, grid, directory, (log,), where="flower")
            finally:
                log.line(json.dumps({"budgets": self._statements.budgets()}))

    def _directory(self, current: Current, job: Job) -> tuple[RunDirectory, bool]:
        """The run's directory, and whether it was begun before."""
        named = current.directory or current.action.removeprefix(RESUME)
        if not named:
            return RunDirectory.create(new_run_path(job, self._kit.runs_folder), job), False
        if not RUN_ID.match(named):
            raise UsageError("this names no run of the server")
        run = RunDirectory.open(self._kit.runs_folder / named)
        if run.job().digest != job.digest:
            raise UsageError(f"{named}: is a run of another job")
        return run, run.events_file.exists()

    def _consider(self, task: Task, current: Current, grid: SiteGrid, job: Job) -> None:
        """Ask every site whether it would accept the job."""
        site_of = {f"client-{number}": site for number, site in enumerate(job.cohort.sites)}
        nodes = {node.node_id: site_of[node.name] for node in grid.get_nodes()}
        exchange = Exchange(grid, CONSIDER_DEADLINE_S)
        exchange.send([Message(RecordDict(), dst_node_id=node, message_type="query.consider") for node in nodes])
        answers = dict.fromkeys(job.cohort.sites, "not connected") | dict.fromkeys(nodes.values(), "no answer")
        for request, reply in exchange.replies():
            if request is not None:
                refusal = reply.error.reason or "refused" if reply.has_error() else None
                answers[nodes[request.metadata.dst_node_id]] = refusal or "accepts"
        self._log(task, current, json.dumps({"considered": answers}))

    def _log(self, task: Task, current: Current, line: str) -> None:
        try:
            task.push_log(current.run_id, line + "\n")
        except Exception:
            logger.exception("the log line was not taken: %s", line)


def require_drivable(job: Job, strategies: tuple[str, ...], known_sites: list[str]) -> None:
    """What a server demands of a signed job: its code is installed, its sites exist, every round is committed."""
    name = job.server.strategy
    if ":" in name and name not in strategies:
        raise UsageError(f"server.strategy = '{name}' is not in the strategies that this server allows (server.toml)")
    if not job.cohort.sites:
        raise UsageError("cohort.sites is empty: submit the job with `fedplat submit`, which fills it in")
    unknown = [site for site in job.cohort.sites if site not in known_sites]
    if unknown:
        raise UsageError(f"cohort.sites: no site '{unknown[0]}' in the roster. It has {', '.join(known_sites)}")
    if job.server.checkpoint_every != 1:
        raise UsageError("server.checkpoint_every must be 1 on a federation: sites answer for each round once")
