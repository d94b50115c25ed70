"""Client-level privacy through the whole server: cohorts, refusals, empty rounds, resume, the adaptive clip norm."""

import itertools
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Array, Context, Message

from fedplat import wire
from fedplat.errors import JobError, UsageError
from fedplat.events import ClientFailed, ClientTrained, RoundFinished, RoundStarted, read_events
from fedplat.rundir import RunDirectory
from fedplat.tasks import load_task
from fedplat.wire import JOB_KEY
from server_app.checkpoint import CheckpointStore
from server_app.cohort import round_cohort, sample_cohort
from server_app.evaluation import GlobalModel
from server_app.private_mean import NOISE_STATE
from server_app.run import resume_run, start_run
from server_app.strategies import CLIENT_LEVEL, build_strategy, strategy_names
from simulations.local_grid import LocalGrid
from tests.server_app.test_driver import client_app, crash, only, run_with, send_nan
from tests.server_app.test_resume import stop_at
from tests.server_app.test_strategies import ARGUMENTS


@pytest.fixture
def private_job(tiny_job):
    """A small job with client-level privacy; keyword arguments as for `tiny_job`."""

    def make(**settings):
        base = {"privacy__unit": "client", "privacy__noise_multiplier": 1.0, "evaluation__server": False}
        return tiny_job(**base | settings)

    return make


def names_of(job) -> list[str]:
    return [f"client-{i}" for i in range(job.cohort.clients)]


def cohorts(job, rounds: int) -> list[list[str]]:
    return [round_cohort(job, names_of(job), number) for number in range(1, rounds + 1)]


def latest(run: RunDirectory):
    checkpoint = CheckpointStore(run.checkpoints, 2).latest()
    assert checkpoint is not None
    return checkpoint


def finished(run: RunDirectory) -> list[RoundFinished]:
    return [event for event in read_events(run.events_file) if isinstance(event, RoundFinished)]


# --- cohorts ----------------------------------------------------------------------------------------


def test_poisson_cohorts_have_the_size_of_independent_coins(private_job):
    """Mean and variance of 300 binomial sizes, 7 standard errors: a false alarm in more than 1e8 runs."""
    sizes = [len(cohort) for cohort in cohorts(private_job(cohort__clients=1000, cohort__size=100), 300)]
    assert np.mean(sizes) == pytest.approx(100, abs=7 * math.sqrt(90 / 300))
    assert np.var(sizes) == pytest.approx(90, abs=7 * 90 * math.sqrt(2 / 300))


def test_fixed_cohorts_have_their_size_and_treat_all_alike(private_job):
    """Each client is in 1 of 4 of 2000 cohorts: 7 standard errors of a binomial, for 8 clients."""
    job = private_job(cohort__clients=8, cohort__size=2, privacy__sampling="fixed")
    drawn = cohorts(job, 2000)
    assert all(len(set(cohort)) == 2 for cohort in drawn)
    for name in names_of(job):
        count = sum(name in cohort for cohort in drawn)
        assert count == pytest.approx(500, abs=7 * math.sqrt(2000 * 0.25 * 0.75))


@pytest.mark.parametrize("sampling", ["poisson", "fixed"])
def test_secret_cohorts_do_not_follow_from_the_seed(sampling, private_job):
    settings = {"cohort__clients": 200, "cohort__size": 50, "privacy__sampling": sampling}
    job = private_job(**settings)
    assert cohorts(job, 3) != cohorts(job, 3)
    insecure = private_job(**settings, privacy__insecure_noise=True)
    assert cohorts(insecure, 3) == cohorts(insecure, 3)
    assert cohorts(insecure, 1) != cohorts(insecure, 2)[1:]


def test_other_cohorts_are_those_of_a_job_without_privacy(private_job, tiny_job):
    sample = {"privacy__unit": "sample", "privacy__sample_rate": 0.1, "privacy__noise_multiplier": 1.0}
    for job in (private_job(privacy__sampling="none"), tiny_job(**sample), tiny_job()):
        expected = [sample_cohort(names_of(job), 4, job.job.seed, "cohort", number) for number in (1, 2, 3)]
        assert cohorts(job, 3) == expected


@pytest.mark.parametrize(("clients", "size", "gap"), [(12, 3, 4), (13, 3, 4), (5, 1, 5), (6, 6, 1)])
def test_banded_cohorts_keep_their_distance(clients, size, gap, private_job):
    job = private_job(
        cohort__clients=clients, cohort__size=size, privacy__sampling="banded", privacy__min_separation=gap
    )
    drawn = cohorts(job, 30)
    assert drawn == cohorts(job, 30)
    assert all(len(set(cohort)) == size for cohort in drawn)
    for name in names_of(job):
        rounds = [number for number, cohort in enumerate(drawn) if name in cohort]
        assert all(later - earlier >= gap for earlier, later in itertools.pairwise(rounds))
    build_strategy(job)


def test_too_few_clients_for_their_distance_are_refused_before_anything_starts(private_job):
    job = private_job(cohort__clients=11, cohort__size=3, privacy__sampling="banded", privacy__min_separation=4)
    with pytest.raises(UsageError, match=r"at least 12 clients.*lower cohort\.size"):
        build_strategy(job)


# --- strategies -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(set(strategy_names()) - CLIENT_LEVEL - {"Scaffold"}))
def test_strategies_that_see_single_updates_are_refused_by_name(name, private_job):
    job = private_job(server__strategy=name, server__args=ARGUMENTS.get(name, {}))
    with pytest.raises(UsageError, match=f"'{name}'"):
        build_strategy(job)


def test_sample_level_takes_any_strategy_but_one_that_needs_losses(tiny_job):
    sample = {"privacy__unit": "sample", "privacy__sample_rate": 0.1, "privacy__noise_multiplier": 1.0}
    build_strategy(tiny_job(**sample, server__strategy="Krum"))
    with pytest.raises(UsageError, match="training loss"):
        build_strategy(tiny_job(**sample, server__strategy="QFedAvg"))


@pytest.mark.parametrize("name", sorted(CLIENT_LEVEL))
@pytest.mark.parametrize("adaptive", [None, {}])
def test_every_mean_based_strategy_trains(name, adaptive, private_job, tmp_path):
    settings = {"privacy__adaptive": adaptive} if adaptive is not None else {}
    job = private_job(
        server__strategy=name, server__args=ARGUMENTS.get(name, {}), privacy__noise_multiplier=0.5, **settings
    )
    run = run_with(job, tmp_path, client_app())
    assert [event.aggregated for event in finished(run)] == [True] * 3
    arrays = latest(run).arrays
    assert all(np.isfinite(array).all() for array in arrays.values())
    assert (wire.CLIP_NORM in arrays) == (adaptive is not None)
    trained = [event for event in read_events(run.events_file) if isinstance(event, ClientTrained)]
    assert all(event.num_examples == 1 and set(event.metrics) == {"lr"} for event in trained)
    assert all(math.isnan(event.update_norm) for event in trained)


# --- rounds -----------------------------------------------------------------------------------------


def claim_examples(message: Message, context: Context, reply: Message) -> Message:
    reply.content[wire.METRICS][wire.NUM_EXAMPLES] = 10**6
    return reply


def tell_loss(message: Message, context: Context, reply: Message) -> Message:
    reply.content[wire.METRICS]["loss"] = 0.1
    return reply


def far_away(message: Message, context: Context, reply: Message) -> Message:
    arrays = reply.content[wire.ARRAYS]
    for name in arrays:
        arrays[name] = Array(arrays[name].numpy() + np.float32(10.0))
    return reply


@pytest.mark.parametrize(
    ("behave", "reason"),
    [(send_nan, "NaN"), (claim_examples, "from 1 to 1"), (tell_loss, "'loss'.*no budget"), (crash, "fire")],
)
def test_a_hostile_client_loses_its_place_and_nothing_else(behave, reason, private_job, tmp_path):
    job = private_job(cohort__fraction=1.0, privacy__sampling="none", job__rounds=1)
    run = run_with(job, tmp_path, client_app(only(0, behave)))
    (round_,) = finished(run)
    assert round_.aggregated and round_.accepted == 5
    (failure,) = [event for event in read_events(run.events_file) if isinstance(event, ClientFailed)]
    assert re.search(reason, failure.reason)


def change_of(run: RunDirectory, start) -> float:
    arrays = latest(run).arrays
    return math.sqrt(sum(float(np.square(arrays[name] - start[name], dtype=np.float64).sum()) for name in start))


def test_a_far_away_update_moves_the_model_no_further_than_the_clip_norm(private_job, tmp_path):
    job = private_job(
        cohort__fraction=1.0,
        privacy__sampling="none",
        privacy__clip_norm=0.5,
        privacy__noise_multiplier=1e-9,
        privacy__insecure_noise=True,
        job__rounds=1,
    )
    start = GlobalModel(job, load_task(job)).initial
    run = run_with(job, tmp_path, client_app(far_away))
    assert [event.accepted for event in finished(run)] == [6]
    assert change_of(run, start) == pytest.approx(0.5, rel=1e-4)  # all six pull the same way, each with 0.5 / 6


def test_a_retried_client_counts_once(private_job, tmp_path):
    failed: set[int] = set()

    def crash_once(message: Message, context: Context, reply: Message) -> Message:
        node = int(context.node_config["partition-id"])
        if node not in failed:
            failed.add(node)
            raise RuntimeError("first attempt")
        return reply

    job = private_job(cohort__fraction=1.0, privacy__sampling="none", cohort__on_failure="retry", job__rounds=1)
    run = run_with(job, tmp_path, client_app(crash_once))
    (round_,) = finished(run)
    assert round_.accepted == 6 and round_.failed == 0
    trained = [event.client for event in read_events(run.events_file) if isinstance(event, ClientTrained)]
    assert sorted(trained) == names_of(job)


def with_empty_rounds(private_job, **settings):
    """A job whose (repeatable) cohorts include empty ones, the first and another."""
    for seed in range(100):
        small = {"cohort__size": 1, "privacy__insecure_noise": True, "job__rounds": 4, "job__seed": seed}
        job = private_job(**small, **settings)
        sizes = [len(cohort) for cohort in cohorts(job, 4)]
        if sizes[0] == 0 and 0 in sizes[1:] and any(sizes):
            return job
    raise AssertionError("no seed has empty rounds")


@pytest.mark.parametrize("strategy", ["FedAvg", "FedAvgM", "FedAdam"])
def test_an_empty_cohort_releases_noise_and_the_round_counts(strategy, private_job, tmp_path):
    job = with_empty_rounds(private_job, server__strategy=strategy)
    run = run_with(job, tmp_path, client_app())
    rounds, started = finished(run), [e for e in read_events(run.events_file) if isinstance(e, RoundStarted)]
    assert [event.aggregated for event in rounds] == [True] * 4
    assert [event.accepted for event in rounds] == [len(event.cohort) for event in started]
    assert rounds[0].accepted == 0


def test_nobody_answers_stops_the_run_or_carries_on_as_the_job_says(private_job, tmp_path):
    everyone = {"cohort__fraction": 1.0, "privacy__sampling": "none", "job__rounds": 1}
    with pytest.raises(JobError, match="0 accepted updates"):
        run_with(private_job(**everyone), tmp_path, client_app(crash), name="stops")
    run = run_with(private_job(**everyone, cohort__on_shortfall="skip"), tmp_path, client_app(crash), name="on")
    (round_,) = finished(run)
    assert round_.aggregated and round_.accepted == 0


def test_two_runs_of_one_job_differ_and_under_the_insecure_flag_they_do_not(private_job, tmp_path):
    def model(name: str, **settings) -> bytes:
        return run_with(private_job(**settings), tmp_path, client_app(), name=name).model_file.read_bytes()

    assert model("a", privacy__sampling="none") != model("b", privacy__sampling="none")
    assert model("c", privacy__insecure_noise=True) == model("d", privacy__insecure_noise=True)


# --- resume -----------------------------------------------------------------------------------------


def banded_job(private_job, **settings):
    base = {"cohort__size": 2, "privacy__sampling": "banded", "privacy__min_separation": 3, "job__rounds": 6}
    return private_job(**base | {"privacy__insecure_noise": True} | settings)


def grid_of_job(job) -> LocalGrid:
    return LocalGrid(client_app(), job.cohort.clients, {JOB_KEY: job.canonical()})


def stopped_at(job, path, number: int) -> RunDirectory:
    run = RunDirectory.create(path, job)
    with pytest.raises(KeyboardInterrupt):
        start_run(job, grid_of_job(job), run, (stop_at(RoundStarted, number),))
    return run


@pytest.mark.parametrize("strategy", ["FedAvg", "FedAdam"])
def test_banded_noise_goes_on_where_the_checkpoint_left_it(strategy, private_job, tmp_path):
    job = banded_job(private_job, server__strategy=strategy)
    whole = run_with(job, tmp_path, client_app(), name="whole")
    broken = stopped_at(job, tmp_path / "broken", 5)
    kept = [name for name in latest(broken).strategy if name.startswith(NOISE_STATE)]
    assert len(kept) == 2  # bands − 1
    resume_run(grid_of_job(job), RunDirectory(broken.path))
    assert broken.model_file.read_bytes() == whole.model_file.read_bytes()


def test_a_checkpoint_without_its_noise_is_refused(private_job, tmp_path):
    job = banded_job(private_job)
    broken = stopped_at(job, tmp_path / "broken", 5)
    stripped = replace(latest(broken), strategy={})
    shutil.rmtree(broken.checkpoints / "round-000004")
    CheckpointStore(broken.checkpoints, 2).save(stripped)
    with pytest.raises(UsageError, match="lacks the noise"):
        resume_run(grid_of_job(job), RunDirectory(broken.path))


def test_a_repeated_round_draws_its_noise_anew(private_job, tmp_path):
    """Equal noise on two different sums would cancel in their difference. All but the noise repeats here."""
    job = banded_job(private_job, privacy__insecure_noise=False, job__rounds=3)
    first = stopped_at(job, tmp_path / "first", 3)
    second = RunDirectory(Path(shutil.copytree(first.path, tmp_path / "second")))
    for run in (first, second):
        resume_run(grid_of_job(job), RunDirectory(run.path))
    one, other = latest(first).arrays, latest(second).arrays
    assert all((one[name] != other[name]).mean() > 0.9 for name in one)


# --- the adaptive clip norm -------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["FedAvg", "FedAdam"])
@pytest.mark.parametrize(("start", "direction"), [(100.0, -1), (1e-3, 1)])
def test_the_clip_norm_moves_towards_the_quantile(start, direction, strategy, private_job, tmp_path):
    job = private_job(
        cohort__fraction=1.0,
        privacy__clip_norm=start,
        privacy__adaptive={},
        privacy__sampling="none",
        privacy__insecure_noise=True,
        server__strategy=strategy,
        job__rounds=8,
        privacy__noise_multiplier=0.2,
    )
    moved = math.log(float(latest(run_with(job, tmp_path, client_app())).arrays[wire.CLIP_NORM]) / start)
    assert direction * moved == pytest.approx(8 * 0.2 * 0.5, rel=0.5)


@pytest.mark.parametrize("strategy", ["FedAvg", "FedAdam", "FedMedian"])
def test_with_sample_level_privacy_the_clip_norm_is_the_mean_of_the_clients(strategy, tiny_job, tmp_path):
    def answer(message: Message, context: Context, reply: Message) -> Message:
        node = int(context.node_config["partition-id"])
        reply.content[wire.ARRAYS][wire.CLIP_NORM] = Array(np.array(1.0 + node, np.float32))
        return reply

    job = tiny_job(
        privacy__unit="sample",
        privacy__noise_multiplier=1.0,
        privacy__sample_rate=0.2,
        privacy__adaptive={},
        cohort__fraction=1.0,
        server__strategy=strategy,
        evaluation__server=False,
        job__rounds=2,
    )
    run = run_with(job, tmp_path, client_app(answer))
    assert float(latest(run).arrays[wire.CLIP_NORM]) == pytest.approx(3.5)
