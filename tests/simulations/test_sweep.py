"""A sweep that was stopped and continued equals one never stopped; what it found is in its tables."""

import csv
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedplat.errors import FedplatError, UsageError
from fedplat.events import Event, RoundStarted
from fedplat.job import Job
from simulations.sweep import open_sweep, read_spec, run_points
from simulations.sweep_plan import Point, SweepSpec, check_points, plan_points
from simulations.sweep_results import Spread, collect, write_results
from tests.simulations.conftest import GRID


class Watcher:
    """Notes what happens to each point, and presses Ctrl-C in the given round of the given point."""

    def __init__(self, stop_in: int | None = None, stop_round: int = 2) -> None:
        self.actions: list[str] = []
        self.errors: dict[str, FedplatError] = {}
        self._stop_in, self._stop_round = stop_in, stop_round

    def begin(self, point: Point, action: str) -> None:
        self.actions.append(action)

    def event(self, event: Event) -> None:
        here = len(self.actions) - 1 == self._stop_in
        if here and isinstance(event, RoundStarted) and event.round == self._stop_round:
            raise KeyboardInterrupt

    def end(self, point: Point, error: FedplatError | None) -> None:
        if error:
            self.errors[point.name] = error


def drive(folder, spec: SweepSpec, watcher: Watcher | None = None) -> dict[str, str]:
    points = plan_points(spec)
    open_sweep(folder, spec, points)
    failures = run_points(folder, points, watcher or Watcher())
    write_results(folder, collect(folder, points))
    return failures


def models(folder) -> dict[str, list[str]]:
    found = json.loads((folder / "results.json").read_text())
    return {row["name"]: [run["model_sha256"] for run in row["runs"]] for row in found["points"]}


# --- running -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Folders of sweeps that were never stopped, by their spec."""
    folders = {}

    def make(spec: SweepSpec):
        key = repr(spec)
        if key not in folders:
            folders[key] = tmp_path_factory.mktemp("whole") / "sweep"
            drive(folders[key], spec)
        return folders[key]

    return make


@pytest.mark.parametrize(("stop_in", "stop_round"), [(0, 1), (1, 3), (3, 2)])
def test_stopped_and_continued_equals_never_stopped(stop_in, stop_round, spec, whole, tmp_path):
    sweep = spec(seeds=1)
    with pytest.raises(KeyboardInterrupt):
        drive(tmp_path / "broken", sweep, Watcher(stop_in, stop_round))
    watcher = Watcher()
    drive(tmp_path / "broken", read_spec(tmp_path / "broken"), watcher)
    assert watcher.actions == ["skip"] * stop_in + ["resume"] + ["start"] * (3 - stop_in)
    assert models(tmp_path / "broken") == models(whole(sweep))
    assert all(digest for digests in models(tmp_path / "broken").values() for digest in digests)


def test_a_finished_sweep_runs_nothing_and_gives_the_same_results(spec, whole):
    folder, watcher = whole(spec(seeds=1)), Watcher()
    before = (folder / "results.json").read_bytes()
    drive(folder, spec(seeds=1), watcher)
    assert watcher.actions == ["skip"] * 4 and (folder / "results.json").read_bytes() == before


def test_a_point_killed_while_its_directory_was_made_is_started(spec, whole, tmp_path):
    sweep, folder = spec(seeds=1), tmp_path / "killed"
    points = plan_points(sweep)
    open_sweep(folder, sweep, points)
    (folder / points[0].name / "checkpoints").mkdir(parents=True)
    (folder / points[0].name / ".job.toml.part").touch()
    drive(folder, sweep)
    assert models(folder) == models(whole(sweep))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"grid": ("local.lr=0.1,0.5", GRID[1])}, "the grid"),
        ({"grid": GRID[::-1]}, "the grid"),
        ({"seeds": 3, "local__batch_size": 8}, "the base job, the seeds"),
    ],
)
def test_another_sweep_in_the_same_folder_is_refused(changed, message, spec, tmp_path):
    folder, asked = tmp_path / "sweep", spec()
    open_sweep(folder, asked, plan_points(asked))
    before = (folder / "sweep.toml").read_bytes()
    with pytest.raises(UsageError, match=rf"another sweep: it differs in {message}\..*--resume"):
        open_sweep(folder, spec(**changed), plan_points(spec(**changed)))
    assert (folder / "sweep.toml").read_bytes() == before


def test_a_sweep_whose_jobs_changed_since_is_refused(spec, tmp_path):
    folder, asked = tmp_path / "sweep", spec()
    open_sweep(folder, asked, plan_points(asked))
    changed = check_points(plan_points(asked), lambda job: job.model_copy(update={"task": spec_task(job)}))
    with pytest.raises(UsageError, match="the jobs of its points have changed"):
        open_sweep(folder, asked, changed)


def spec_task(job: Job):
    return job.task.model_copy(update={"init_sha256": "0" * 64})


def test_a_foreign_folder_is_refused_and_left_alone(spec, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="holds no sweep"):
        open_sweep(tmp_path, spec(), plan_points(spec()))
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    with pytest.raises(UsageError, match="not a sweep"):
        read_spec(tmp_path)


@pytest.mark.parametrize("content", ["seeds = [", "seeds = 1", "seeds = 'x'\ngrid = []\n[base]", "grid = 1"])
def test_a_damaged_sweep_file_is_named(content, tmp_path):
    (tmp_path / "sweep.toml").write_text(content)
    with pytest.raises(UsageError, match=r"sweep\.toml"):
        read_spec(tmp_path)


def test_what_stands_in_a_points_place_stops_the_sweep_before_it_starts(spec, simulated, tiny_job, tmp_path):
    sweep = spec(seeds=1)
    points = plan_points(sweep)
    folder = tmp_path / "sweep"
    open_sweep(folder, sweep, points)
    (folder / points[3].name).mkdir()
    (folder / points[3].name / "thesis.txt").touch()
    with pytest.raises(UsageError, match="in the way"):
        run_points(folder, points, Watcher())
    (folder / points[3].name).rename(tmp_path / "away")
    simulated(tiny_job(), f"sweep/{points[3].name}")
    with pytest.raises(UsageError, match="is not that of this sweep"):
        run_points(folder, points, Watcher())
    assert not (folder / points[0].name).exists()


def test_a_run_that_settled_its_engine_is_still_the_points(spec, simulated, tmp_path):
    sweep, folder = spec(grid=("local.lr=0.1,0.4",), seeds=1, simulation__engine="auto"), tmp_path / "sweep"
    points = plan_points(sweep)
    open_sweep(folder, sweep, points)
    settled = points[0].job.simulation.model_copy(update={"engine": "serial", "chunk": 3})
    simulated(points[0].job.model_copy(update={"simulation": settled}), f"sweep/{points[0].name}")
    watcher = Watcher()
    run_points(folder, points, watcher)
    assert watcher.actions == ["skip", "start"]


def test_a_point_stopped_while_its_engine_is_chosen_leaves_nothing_behind(spec, monkeypatch, tmp_path):
    def stop(job: Job) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("simulations.choose.settle_engine", stop)
    with pytest.raises(KeyboardInterrupt):
        drive(tmp_path / "s", spec(simulation__engine="auto"))
    assert not [path for path in (tmp_path / "s").iterdir() if path.is_dir()]


def test_a_point_that_fails_is_noted_and_the_others_go_on(spec, tmp_path):
    watcher = Watcher()
    # An absurdly small norm limit refuses every update.
    failures = drive(tmp_path / "s", spec(grid=("server.max_update_norm=1e-12,1e4",), seeds=2), watcher)
    assert list(failures) == list(watcher.errors) == [f"server.max_update_norm=1e-12,seed={seed}" for seed in (0, 1)]
    found = json.loads((tmp_path / "s/results.json").read_text())
    good, bad = found["points"]
    assert good["finished"] == 2 and found["best"] == good
    assert bad["finished"] == 0 and bad["accuracy_mean"] is None
    assert {run["status"] for run in bad["runs"]} == {"failed"} and "accepted updates" in bad["runs"][0]["reason"]


# --- results -------------------------------------------------------------------------------------------


def test_rows_are_sorted_best_first_and_aggregate_their_seeds(spec, whole):
    folder = whole(spec(grid=("local.lr=0.001,0.4",), seeds=3))
    found = json.loads((folder / "results.json").read_text())
    assert [row["settings"] for row in found["points"]] == [{"local.lr": 0.4}, {"local.lr": 0.001}]
    for row in found["points"]:
        scores = [run["test_accuracy"] for run in row["runs"]]
        mean = sum(scores) / 3
        assert row["accuracy_mean"] == pytest.approx(mean)
        assert row["accuracy_std"] == pytest.approx((sum((x - mean) ** 2 for x in scores) / 2) ** 0.5)
        assert row["accuracy_best"] >= max(scores) and row["rounds"] == 3 and row["seconds"] > 0
    rows = list(csv.DictReader((folder / "results.csv").open()))
    assert [float(row["accuracy_mean"]) for row in rows] == [row["accuracy_mean"] for row in found["points"]]
    assert (folder / "comparison.png").read_bytes().startswith(b"\x89PNG")


def test_a_loss_is_better_when_lower(spec, whole):
    folder = whole(spec(grid=("local.lr=0.001,0.4",), seeds=1, evaluation__metric="loss"))
    found = json.loads((folder / "results.json").read_text())
    losses = [row["loss_mean"] for row in found["points"]]
    assert losses == sorted(losses) and found["best"]["settings"] == {"local.lr": 0.4}


def test_without_evaluation_there_is_a_table_but_no_best(spec, whole):
    folder = whole(spec(grid=("local.lr=0.1,0.4",), seeds=1, evaluation__server=False))
    found = json.loads((folder / "results.json").read_text())
    assert found["best"] is None and [row["finished"] for row in found["points"]] == [1, 1]


@given(st.lists(st.floats(), max_size=5))
def test_a_spread_never_raises(values):
    spread = Spread.over(values)
    assert (spread is None) == (not values) and (len(values) < 2 or spread.std is not None)
