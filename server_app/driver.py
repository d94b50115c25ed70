"""The round driver: runs any Flower strategy through its public methods, and adds what Flower lacks.

Each round: sample the cohort by name → show the strategy a Grid with only that cohort → collect and
check updates → aggregate → evaluate → commit a checkpoint. Everything random in round r comes from
(seed, r), so a run that was killed and resumed ends with the same bits as one that never stopped. Under client-level
privacy noise and cohorts are secret and drawn anew instead: a repeated round is a new release.
"""

import contextlib
import errno
import gc
import logging
import time
from dataclasses import replace
from typing import Literal

from flwr.app import ArrayRecord, Message
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from fedplat import wire
from fedplat.errors import FedplatError, JobError, UsageError
from fedplat.events import (
    Checkpointed,
    ClientFailed,
    Evaluated,
    EventLog,
    Interrupted,
    PrivacySpent,
    RoundStarted,
    RunFailed,
    RunFinished,
)
from fedplat.federation import client_name
from fedplat.job import Job
from fedplat.model import Arrays
from fedplat.rundir import RunDirectory
from fedplat.streams import globals_seeded
from fedplat.wire import Identity
from server_app.adaptive_clip import send_clip_norm, without_clip_norm
from server_app.admission import Admissions, needs_admission
from server_app.checkpoint import Checkpoint, CheckpointStore, HoldsClientState
from server_app.client_evaluation import EvaluationPhase
from server_app.cohort import CohortGrid, Roster, round_cohort, sample_cohort
from server_app.collect import Collector, Tally
from server_app.evaluation import GlobalModel
from server_app.exchange import Exchange
from server_app.private_mean import NOISE_STATE, CentralNoise
from server_app.spending import KnowsReleases, RunBook
from server_app.stopping import after_evaluation
from server_app.strategies import MEAN_BASED
from server_app.strategy_state import decode_state, encode_state

logger = logging.getLogger(__name__)
LARGE_BYTES = 64 << 20
"""A model that is worth a look for memory that could be had back."""
STORAGE_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.EACCES})


class Driver:
    """Drives one run from its state to its end."""

    def __init__(
        self,
        job: Job,
        grid: Grid,
        strategy: Strategy,
        model: GlobalModel,
        run: RunDirectory,
        log: EventLog,
        *,
        real_sites: bool = False,
    ) -> None:
        self._job, self._grid, self._strategy, self._model = job, grid, strategy, model
        self._run, self._log = run, log
        self._store = CheckpointStore(run.checkpoints, job.server.keep_checkpoints)
        self._names = [client_name(i) for i in range(job.cohort.clients)]
        self._roster = Roster(grid, self._names)
        self._admissions = Admissions(job, grid, needed=real_sites and needs_admission(job))
        self._state = Checkpoint(0, job.digest, model.initial, {})
        self._noise = CentralNoise.of(job)
        self._book = RunBook(job, run)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Continue after the checkpoint's round instead of from the beginning."""
        if checkpoint.strategy is None:
            raise UsageError(
                f"strategy {self._job.server.strategy} has no state codec, so this run can't be resumed. "
                "Give it state_arrays() and load_state_arrays()"
            )
        own = {name: array for name, array in checkpoint.strategy.items() if not name.startswith(NOISE_STATE)}
        decode_state(self._strategy, own)
        if self._noise is not None:
            self._noise.load_state_arrays(checkpoint.strategy, checkpoint.round)
        if isinstance(self._grid, HoldsClientState):
            self._grid.restore_client_states(checkpoint.clients)
        elif self._job.uses_client_state:
            raise UsageError(
                "this job's clients keep state, which this Grid can't restore: the run can't be resumed here"
            )
        # A safetensors file forgets the order of tensors, and Flower's strategies zip by position.
        self._state = replace(checkpoint, arrays=self._model.conform(checkpoint.arrays))

    def run(self) -> None:
        """Run to the end. Whatever stops it is an event; everything up to the last commit is safe."""
        try:
            self._roster.wait(self._job.cohort.deadline_s)
            if self._state.round == 0:
                self._evaluate_server(0)
            while self._state.progress.stop is None and self._state.round < self._job.job.rounds:
                self._round(self._state.round + 1)
            self._finish()
        except KeyboardInterrupt:
            self._note(Interrupted(round=self._state.round))
            raise
        except FedplatError as error:
            self._note(RunFailed(round=self._state.round, reason=str(error)))
            raise
        except OSError as error:
            if error.errno not in STORAGE_ERRORS:
                raise self._broken(error) from error
            raise self._failed_to_store(error) from error
        except Exception as error:
            raise self._broken(error) from error
        finally:
            self._book.close()

    def _broken(self, error: Exception) -> JobError:
        reason = f"{type(error).__name__}: {error}"
        self._note(RunFailed(round=self._state.round, reason=reason))
        return JobError(f"after round {self._state.round}: {reason}")

    def _note(self, event: Interrupted | RunFailed) -> None:
        # The disk may be what failed: the reason still reaches the person through the exception.
        with contextlib.suppress(OSError):
            self._log.append(event)

    def _failed_to_store(self, error: OSError) -> JobError:
        reason = f"round {self._state.round}: {self._run.path} could not be written: {error.strerror or error}"
        self._note(RunFailed(round=self._state.round, reason=reason))
        return JobError(f"{reason}. Committed rounds are intact: make room first")

    # --- one round ------------------------------------------------------------------------------

    def _round(self, number: int) -> None:
        started = time.perf_counter()
        cohort = round_cohort(self._job, self._names, number)
        self._book.reserve(number)
        self._log.append(RoundStarted(round=number, cohort=cohort))
        tally, arrays = self._train(number, cohort)
        self._book.commit()
        seconds = time.perf_counter() - started
        self._state = replace(self._state, round=number, arrays=arrays or self._state.arrays)
        summary = tally.summary(number, arrays is not None, seconds)
        self._log.append(summary)
        self._note_privacy(number)
        logger.info("round %d: %d accepted, %.2f s, %s", number, summary.accepted, seconds, summary.metrics)
        last = number == self._job.job.rounds
        if last or number % self._job.evaluation.every == 0:
            self._evaluate_server(number)
            self._evaluate_clients(number)
        if last or self._state.progress.stop or number % self._job.server.checkpoint_every == 0:
            self._commit()

    def _note_privacy(self, number: int) -> None:
        known = self._grid.most_releases() if isinstance(self._grid, KnowsReleases) else None
        self._append_privacy(self._book.spent(number, known))

    def _append_privacy(self, spent: PrivacySpent | None) -> None:
        if spent is not None:
            self._log.append(spent)

    def _train(self, number: int, cohort: list[str]) -> tuple[Tally, Arrays | None]:
        """Train a cohort; None instead of arrays if the round did not change the model."""
        nodes = self._connected(number, cohort, "train")
        asked = bool(nodes) or self._noise is not None
        requests = self._requests(number, nodes, train=True) if asked else []
        collector = self._collector(number, nodes)
        if asked:
            collector.run(Exchange(self._grid, self._job.cohort.deadline_s), requests)
        del requests
        collector.tally.failures.update({client: "error" for client in cohort if client not in nodes})
        accepted = len(collector.tally.reports)
        if accepted < self._least_replies(cohort):
            least = f"cohort.min_replies = {self._job.cohort.min_replies}"
            self._shortfall(number, collector.tally, f"{accepted} accepted updates, {least}")
            if self._noise is None:  # else carry on: the noise is right for any number, and skipping would tell
                return collector.tally, None
        with self._seeded("aggregate", number):
            arrays, _ = self._strategy.aggregate_train(number, collector.replies())
        self._collect_cycles()
        if arrays is None:
            name = self._job.server.strategy
            self._shortfall(number, collector.tally, f"strategy {name} did not aggregate {accepted} accepted updates")
            return collector.tally, None
        return collector.tally, self._model.conform(wire.view_arrays(arrays) | collector.clip_norm())

    def _collect_cycles(self) -> None:
        """Flower's views of a message's records are cycles (see `wire.records`) that keep what was aggregated."""
        if sum(array.nbytes for array in self._state.arrays.values()) >= LARGE_BYTES:
            gc.collect()

    def _collector(self, number: int, nodes: dict[str, int]) -> Collector:
        reduce, arrays = self._job.server.strategy in MEAN_BASED, self._state.arrays
        private = None if self._noise is None else self._noise.reducer(number, arrays)
        name_of = {n: c for c, n in nodes.items()}
        return Collector(self._job, number, self._model.origin(arrays), name_of, reduce, self._log.append, private)

    def _least_replies(self, cohort: list[str]) -> int:
        """A private cohort may be small, or empty, by chance: that is no shortfall."""
        least = self._job.cohort.min_replies
        return least if self._noise is None else min(least, len(cohort))

    def _connected(self, number: int, cohort: list[str], phase: Literal["train", "evaluate"]) -> dict[str, int]:
        """The cohort's nodes; those that are not connected, or have not admitted the job, are noted as failed."""
        known = self._admissions.among(number, self._roster.refresh())
        for client in cohort:
            if client not in known:
                reason = self._admissions.why_not(client)
                self._log.append(
                    ClientFailed(round=number, client=client, phase=phase, kind="error", reason=reason, attempt=0)
                )
        return {client: known[client] for client in cohort if client in known}

    def _requests(self, number: int, nodes: dict[str, int], *, train: bool) -> list[Message]:
        """The strategy's messages to a cohort."""
        # An empty cohort is a round too: the strategy takes the model from here, and its message is dropped.
        grid = CohortGrid(self._grid, nodes.values() or [1])
        arrays: ArrayRecord = wire.encode_arrays(without_clip_norm(self._state.arrays))
        # From here on the model and its messages share their memory.
        self._state = replace(self._state, arrays=self._state.arrays | wire.view_arrays(arrays))
        config = Identity(self._job.digest, number, attempt=1).record()
        configure = self._strategy.configure_train if train else self._strategy.configure_evaluate
        with self._seeded("configure" if train else "configure-evaluate", number):
            requests = list(configure(number, arrays, config, grid))
        send_clip_norm(requests, self._state.arrays)
        return requests if nodes else []

    def _seeded(self, purpose: str, number: int) -> contextlib.AbstractContextManager[None]:
        return globals_seeded(self._job.job.seed, purpose, number)

    def _shortfall(self, number: int, tally: Tally, problem: str) -> None:
        if self._job.cohort.on_shortfall == "stop":
            counts = f"{tally.count('error')} failed, {tally.count('late')} late, {tally.count('refused')} refused"
            common = tally.reasons.most_common(1)
            reason = f"; most often: {common[0][0][:200]}" if common else ""
            raise JobError(f"round {number}: {problem} ({counts}{reason})")

    # --- evaluation -----------------------------------------------------------------------------

    def _evaluate_server(self, number: int) -> None:
        evaluation = self._job.evaluation
        if not evaluation.server:
            return
        measured = self._model.measure(self._state.arrays)
        if evaluation.metric not in measured.metrics:
            raise JobError(
                f"evaluation.metric = '{evaluation.metric}' is not among the task's metrics: "
                f"{', '.join(measured.metrics)}"
            )
        progress = after_evaluation(self._state.progress, measured.metrics[evaluation.metric], number, evaluation)
        best = progress.best_round == number
        if best:
            self._store.save_best(number, self._state.arrays)
        self._state = replace(self._state, progress=progress)
        self._log.append(
            Evaluated(
                round=number,
                where="server",
                num_examples=measured.num_examples,
                metrics=measured.metrics,
                best=best,
            )
        )

    def _evaluate_clients(self, number: int) -> None:
        if self._job.evaluation.clients == 0:
            return
        size = max(1, round(self._job.cohort.clients * self._job.evaluation.clients))
        cohort = sample_cohort(self._names, size, self._job.job.seed, "evaluate", number)
        nodes = self._connected(number, cohort, "evaluate")
        phase = EvaluationPhase(self._job, number, {n: c for c, n in nodes.items()}, self._log.append)
        if nodes:
            exchange = Exchange(self._grid, self._job.cohort.deadline_s)
            phase.run(exchange, self._requests(number, nodes, train=False))
        if phase.replies:
            with self._seeded("aggregate-evaluate", number):
                self._strategy.aggregate_evaluate(number, [phase.replies[c] for c in cohort if c in phase.replies])
            total = sum(report.num_examples for report in phase.tally.reports.values())
            metrics = phase.tally.mean_metrics()
            self._log.append(Evaluated(round=number, where="clients", num_examples=total, metrics=metrics))

    # --- durability -----------------------------------------------------------------------------

    def _commit(self) -> None:
        """Everything the next round depends on, in one atomic step; events of the round first."""
        clients = self._grid.client_states() if isinstance(self._grid, HoldsClientState) else {}
        strategy = encode_state(self._strategy)
        if strategy is not None and self._noise is not None:
            strategy |= self._noise.state_arrays()
        self._state = replace(self._state, strategy=strategy, clients=clients)
        self._log.sync()
        self._store.save(self._state)
        self._log.append(Checkpointed(round=self._state.round))

    def _finish(self) -> None:
        sha256 = self._model.save(self._state.arrays, self._run.model_file)
        best_round = self._state.progress.best_round
        if best_round is not None:
            self._model.save(self._store.load_best(best_round), self._run.best_file)
        reason = self._state.progress.stop or "rounds"
        if reason != "rounds" and self._state.round > 0:  # in round 0 nothing was released that could have stopped it
            self._append_privacy(self._book.spent_as_planned(self._state.round))
        self._log.append(RunFinished(round=self._state.round, reason=reason, model_sha256=sha256))
        self._log.sync()
