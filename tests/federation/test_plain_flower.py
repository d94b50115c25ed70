"""The Flower app is valid, and the same job gives the same bits in a simulation and on real Flower over TLS."""

import subprocess
import zipfile
from pathlib import Path

import pytest

from fedplat.events import Evaluated, read_events
from fedplat.rundir import list_runs
from tests.federation.flower_processes import PARTS, FlowerFederation


def test_flwr_build_makes_an_archive_of_the_five_rooms(app: Path, tmp_path: Path):
    with_home = FlowerFederation(tmp_path, nodes=0)
    subprocess.run(["flwr", "build", "--app", "."], cwd=app, env=with_home.environment, check=True, capture_output=True)
    (archive,) = app.glob("*.fab")
    names = zipfile.ZipFile(archive).namelist()
    assert {name.split("/")[0] for name in names if name.endswith(".py")} == set(PARTS[3:])
    assert "server_app/app.py" in names and "client_app/app.py" in names


@pytest.mark.slow
def test_real_flower_processes_give_the_same_bits_as_a_simulation(app: Path, tmp_path: Path, tiny_job, simulated):
    job = tiny_job(cohort__clients=2, cohort__fraction=1.0, job__rounds=2)
    run_config = tmp_path / "run.toml"
    run_config.write_text(f"job = '{job.canonical()}'\n")
    with FlowerFederation(tmp_path, nodes=2) as federation:
        federation.flwr("run", str(app), "here", "--stream", "--run-config", str(run_config))
    (real,) = list_runs(tmp_path / "runs")
    assert real.job() == job
    virtual = simulated(job, "virtual")
    assert real.model_file.read_bytes() == virtual.model_file.read_bytes()

    def scores(run):
        return [e.metrics for e in read_events(run.events_file) if isinstance(e, Evaluated)]

    assert scores(real)[-1]["accuracy"] == scores(virtual)[-1]["accuracy"]
