"""Stopped and resumed equals never stopped, bit for bit; what can't be resumed says why."""

import json
import shutil

import pytest
from flwr.app import ConfigRecord, Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg

from client_app.handler import handle_train
from fedplat.errors import UsageError
from fedplat.events import Checkpointed, Event, RoundFinished, RoundStarted, read_events
from fedplat.rundir import RunDirectory
from fedplat.wire import JOB_KEY
from server_app.checkpoint import CheckpointStore
from server_app.run import resume_run, start_run
from server_app.strategies import strategy_names
from simulations.local_grid import LocalGrid
from simulations.simulate import resume, simulate
from tests.server_app.test_strategies import ARGUMENTS


def stop_at(kind: type, number: int):
    """A listener that presses Ctrl-C at the given event."""

    def listen(event: Event) -> None:
        if isinstance(event, kind) and event.round == number:
            raise KeyboardInterrupt

    return listen


def stopped(job, path, kind=RoundStarted, number=4) -> RunDirectory:
    run = RunDirectory.create(path, job)
    with pytest.raises(KeyboardInterrupt):
        simulate(job, run, (stop_at(kind, number),))
    return run


@pytest.mark.parametrize("name", strategy_names())
def test_resume_equals_never_stopped_for_every_strategy(name, tiny_job, simulated, tmp_path):
    job = tiny_job(job__rounds=6, server__strategy=name, server__args=ARGUMENTS.get(name, {}))
    whole = simulated(job, "whole")
    broken = stopped(job, tmp_path / "broken")
    resume(RunDirectory(broken.path))
    assert broken.model_file.read_bytes() == whole.model_file.read_bytes()
    assert broken.best_file.read_bytes() == whole.best_file.read_bytes()


@pytest.mark.parametrize("kind", [RoundStarted, RoundFinished, Checkpointed])
@pytest.mark.parametrize("every", [1, 2, 5])
def test_resume_equals_never_stopped_wherever_it_was_stopped(kind, every, tiny_job, simulated, tmp_path):
    job = tiny_job(job__rounds=6, server__strategy="FedAdam", server__checkpoint_every=every)
    whole = simulated(job, "whole")
    number = 5 if kind is Checkpointed and every == 5 else 4
    broken = stopped(job, tmp_path / "broken", kind, number)
    resume(RunDirectory(broken.path))
    assert broken.model_file.read_bytes() == whole.model_file.read_bytes()


def test_a_run_stopped_before_its_first_commit_starts_over(tiny_job, simulated, tmp_path):
    whole = simulated(tiny_job(), "whole")
    broken = stopped(tiny_job(), tmp_path / "broken", RoundStarted, 1)
    resume(RunDirectory(broken.path))
    assert broken.model_file.read_bytes() == whole.model_file.read_bytes()


def test_the_events_that_count_are_those_of_a_run_never_stopped(tiny_job, simulated, tmp_path):
    job = tiny_job(job__rounds=6, server__checkpoint_every=2)
    whole = simulated(job, "whole")
    broken = stopped(job, tmp_path / "broken", RoundFinished, 5)
    resume(RunDirectory(broken.path))

    def rounds(run):
        finished = [e for e in read_events(run.events_file) if isinstance(e, RoundFinished)]
        timeless = {"time", "seconds"}
        return [e.model_dump(exclude=timeless | {"metrics"}) | {"loss": e.metrics["loss"]} for e in finished]

    assert rounds(broken) == rounds(whole)


def counting_client() -> ClientApp:
    """Counts its rounds in its own state, and lets the count scale its update."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        count = context.state.config_records.get("memory", {"rounds": 0})["rounds"] + 1
        context.state["memory"] = ConfigRecord({"rounds": count, "note": b"\x00bytes"})
        reply = handle_train(message, context)
        context.state["last"] = reply.content.array_records["arrays"].copy()
        for name, array in reply.content["arrays"].items():
            reply.content["arrays"][name] = type(array)(array.numpy() * (1 + 0.01 * count))
        return reply

    return app


def test_client_state_is_committed_with_the_round(tiny_job, tmp_path):
    job = tiny_job(job__rounds=6)

    def grid() -> LocalGrid:
        return LocalGrid(counting_client(), job.cohort.clients, {JOB_KEY: job.canonical()})

    whole = RunDirectory.create(tmp_path / "whole", job)
    start_run(job, grid(), whole)
    broken = RunDirectory.create(tmp_path / "broken", job)
    with pytest.raises(KeyboardInterrupt):
        start_run(job, grid(), broken, (stop_at(RoundFinished, 4),))
    resume_run(grid(), RunDirectory(broken.path))
    assert broken.model_file.read_bytes() == whole.model_file.read_bytes()


class Unknown(FedAvg):
    """A subclass may remember anything."""


class Remembering(FedAvg):
    """A strategy with its own codec."""

    def state_arrays(self):
        return {}

    def load_state_arrays(self, arrays):
        pass


def test_a_strategy_without_codec_refuses_to_resume(tiny_job, tmp_path):
    broken = stopped(tiny_job(server__strategy=f"{__name__}:Unknown", job__rounds=6), tmp_path / "broken")
    with pytest.raises(UsageError, match="no state codec"):
        resume(RunDirectory(broken.path))


def test_a_strategy_with_its_own_codec_resumes(tiny_job, simulated, tmp_path):
    job = tiny_job(server__strategy=f"{__name__}:Remembering", job__rounds=6)
    broken = stopped(job, tmp_path / "broken")
    resume(RunDirectory(broken.path))
    assert broken.model_file.read_bytes() == simulated(job, "whole").model_file.read_bytes()


def test_a_finished_run_is_not_resumed(tiny_job, simulated):
    run = simulated(tiny_job())
    before = run.model_file.read_bytes()
    with pytest.raises(UsageError, match="already finished after round 3"):
        resume(RunDirectory(run.path))
    assert run.model_file.read_bytes() == before


def test_a_run_whose_job_was_changed_is_foreign(tiny_job, tmp_path):
    run = stopped(tiny_job(job__rounds=6), tmp_path / "broken")
    run.job_file.write_text(run.job_file.read_text().replace("lr = 0.2", "lr = 0.3"))
    with pytest.raises(UsageError, match="belong to another job"):
        resume(RunDirectory(run.path))


@pytest.mark.parametrize("file", ["model.safetensors", "strategy.safetensors", "state.json"])
@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_a_damaged_checkpoint_is_named_and_an_older_one_still_serves(file, damage, tiny_job, simulated, tmp_path):
    job = tiny_job(job__rounds=6, server__strategy="FedAdam")
    run = stopped(job, tmp_path / "broken", RoundStarted, 5)
    newest = sorted(run.checkpoints.glob("round-*"))[-1]
    content = bytearray((newest / file).read_bytes())
    if damage == "remove":
        (newest / file).unlink()
    else:
        content[len(content) // 2] ^= 0x55
        (newest / file).write_bytes(content if damage == "flip" else content[: len(content) // 2])
    with pytest.raises(UsageError, match=r"corrupted checkpoint.*Remove that folder"):
        resume(RunDirectory(run.path))
    shutil.rmtree(newest)
    resume(RunDirectory(run.path))
    assert run.model_file.read_bytes() == simulated(job, "whole").model_file.read_bytes()


def test_old_checkpoints_are_pruned_and_the_best_is_kept(tiny_job, simulated):
    run = simulated(tiny_job(job__rounds=6, server__keep_checkpoints=3))
    assert [p.name for p in sorted(run.checkpoints.glob("round-*"))] == ["round-000004", "round-000005", "round-000006"]
    state = json.loads((run.checkpoints / "round-000006/state.json").read_text())
    best = [p.name for p in run.checkpoints.glob("best-*")]
    assert best == [f"best-{state['progress']['best_round']:06d}.safetensors"]
    assert CheckpointStore(run.checkpoints, 3).latest().round == 6
