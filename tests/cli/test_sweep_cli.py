"""`fedplat sweep` as a person meets it."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import FAST
from tests.cli.test_signals import finish, wait_for_round

GRID = ["--grid", "local.lr=0.01,0.5", "--seeds", "2"]


def test_a_sweep_prints_a_table_and_keeps_everything(fedplat):
    result = fedplat("sweep", *FAST, *GRID, "--out", "s")
    assert result.code == 0, result.err
    for expected in (
        "2 settings × 2 seeds → s",
        "4/4  local.lr=0.5,seed=1  loss",
        " ± ",
        "fedplat runs show s/local.lr=",
    ):
        assert expected in result.out
    assert {path.name for path in Path("s").iterdir() if not path.name.startswith(".")} == {
        "sweep.toml", "results.csv", "results.json", "comparison.png",
        *(f"local.lr={lr},seed={seed}" for lr in (0.01, 0.5) for seed in (0, 1)),
    }  # fmt: skip
    assert len(json.loads(fedplat("runs", "list", "--dir", "s", "--json").out)) == 4


def test_json_is_the_last_line_and_the_same_command_runs_nothing_again(fedplat):
    first = fedplat("sweep", *FAST, *GRID, "--out", "s", "--json")
    found = json.loads(first.out.splitlines()[-1])
    assert found == json.loads(Path("s/results.json").read_text())
    assert found["sweep"] == "s" and len(found["points"]) == 2 and found["best"]["settings"] == {"local.lr": 0.5}
    again = fedplat("sweep", *FAST, *GRID, "--out", "s", "--json")
    assert again.err.count("finished before") == 4 and again.out == first.out
    assert fedplat("sweep", "--resume", "s", "--json", "--quiet").out == first.out


def test_quiet_prints_nothing_and_the_default_folder_is_in_sweeps(fedplat):
    result = fedplat("sweep", *FAST, "--grid", "local.lr=0.1,0.5", "--quiet")
    assert (result.code, result.out, result.err) == (0, "", "")
    (folder,) = Path("sweeps").iterdir()
    assert folder.name.startswith("digits-demo-") and (folder / "results.csv").is_file()


def test_a_point_equals_the_same_job_simulated(fedplat):
    fedplat("sweep", *FAST, *GRID, "--out", "s", "--quiet")
    alone = fedplat("simulate", *FAST, "--set", "local.lr=0.5", "--set", "job.seed=1", "-q", "--json", "--out", "alone")
    assert Path("s/local.lr=0.5,seed=1/model.safetensors").read_bytes() == Path("alone/model.safetensors").read_bytes()
    assert json.loads(alone.out)["model_sha256"] in Path("s/results.json").read_text()


BAD = {
    "a typo in the last value": (["--grid", "server.strategy=FedAvg,FedAvgg"], "sweep point server.strategy=FedAvgg"),
    "a value that the data can't serve": (["--grid", "cohort.clients=8,2000"], "only 1438 training examples"),
    "an unknown key": (["--grid", "local.lrr=1,2"], "did you mean 'local.lr'?"),
    "nothing to vary": ([], "nothing varies in this sweep"),
    "a folder of something else": (["--grid", "local.lr=1,2", "--out", "taken"], "holds no sweep"),
    "a missing job file": (["nowhere.toml", "--grid", "local.lr=1,2"], "no such job file"),
    "--resume with more": (["--resume", "taken", "--grid", "local.lr=1,2"], "takes everything from that sweep"),
}


@pytest.mark.parametrize(("arguments", "message"), BAD.values(), ids=BAD.keys())
def test_bad_input_is_explained_before_anything_runs(arguments, message, fedplat):
    Path("taken").mkdir()
    Path("taken/notes.txt").touch()
    result = fedplat("sweep", *FAST, *arguments)
    assert result.code == 2 and result.err.startswith("error: ") and message in result.err
    assert not Path("sweeps").exists() and [path.name for path in Path("taken").iterdir()] == ["notes.txt"]


def test_resuming_what_is_no_sweep_says_so(fedplat):
    result = fedplat("sweep", "--resume", "nowhere")
    assert result.code == 2 and "nowhere: not a sweep (no sweep.toml)" in result.err
    assert fedplat("sweep", "--grid", "local.lr=1,2", "--seeds", "0").code == 2


def test_a_different_sweep_in_the_same_folder_is_refused(fedplat):
    fedplat("sweep", *FAST, *GRID, "--out", "s", "--quiet")
    before = Path("s/results.json").read_bytes()
    result = fedplat("sweep", *FAST, "--grid", "local.lr=0.01,0.7", "--seeds", "2", "--out", "s")
    assert result.code == 2 and "s: holds another sweep: it differs in the grid." in result.err
    assert Path("s/results.json").read_bytes() == before


def test_a_failed_point_is_named_and_the_exit_code_is_one(fedplat):
    result = fedplat("sweep", *FAST, "--grid", "server.max_update_norm=1e-12,1e4", "--out", "s", "--json")
    assert result.code == 1
    assert "1 of 2 runs failed:\n  server.max_update_norm=1e-12,seed=0: " in result.err
    assert "fedplat sweep --resume s" in result.err
    found = json.loads(result.out.splitlines()[-1])
    assert [row["finished"] for row in found["points"]] == [1, 0]


def test_help_has_examples_and_lists_the_command(fedplat):
    assert "sweep" in fedplat("--help").out
    assert "--grid local.lr=0.01,0.1 --grid cohort.fraction=0.1,0.5 --seeds 3" in fedplat("sweep", "--help").out


def test_help_and_planning_import_neither_torch_nor_flower():
    code = "import sys, fedplat.cli.root, simulations.sweep; print({'torch', 'flwr'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_stopped_sweep_continues_to_the_same_models(number, tmp_path):
    job = [
        "--set", "job.rounds=15", "--set", "cohort.clients=20", "--set", "task.args.hidden=16",
        "--grid", "local.lr=0.1,0.5", "--engine", "serial",
    ]  # fmt: skip

    def sweep(*arguments: str) -> subprocess.Popen:
        command = [sys.executable, "-m", "fedplat", "sweep", *arguments, "--json"]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def models(out: str) -> list[str]:
        return [run["model_sha256"] for row in json.loads(out.splitlines()[-1])["points"] for run in row["runs"]]

    process = sweep(*job, "--out", str(tmp_path / "s"))
    wait_for_round(tmp_path / "s/local.lr=0.5,seed=0", 5, process)
    process.send_signal(number)
    code, _, err = finish(process)
    if number != signal.SIGKILL:
        assert code == 130 and f"stopped after 1 of 2 runs. Continue with: fedplat sweep --resume {tmp_path}/s" in err
        assert "Traceback" not in err
    code, out, err = finish(sweep("--resume", str(tmp_path / "s")))
    assert code == 0 and "finished before" in err and "resumed" in err
    assert models(out) == models(finish(sweep(*job, "--out", str(tmp_path / "whole")))[1])
