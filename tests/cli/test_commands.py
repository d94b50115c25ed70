"""A user's first ten minutes, command by command."""

import hashlib
import json
from pathlib import Path

import pytest

from fedplat.events import EVENT
from fedplat.job import Job, load_job
from privacy.plan import plan_privacy
from tests.cli.conftest import FAST

JSON_KEYS = {
    "run", "rounds", "clients", "test_accuracy", "test_loss", "wall_s", "clients_per_s", "bytes_up", "bytes_down",
    "model_sha256",
}  # fmt: skip


def test_help_shows_every_command_and_examples(fedplat):
    top = fedplat("--help")
    assert top.code == 0 and all(name in top.out for name in ("simulate", "resume", "job", "data", "runs"))
    assert "--set cohort.fraction=0.5" in fedplat("simulate", "--help").out
    assert fedplat("--version").out.startswith("fedplat 0.")


def test_simulate_prints_the_result_and_the_next_step(fedplat):
    result = fedplat("simulate", *FAST)
    assert result.code == 0
    (run,) = Path("runs").iterdir()
    for expected in ("test accuracy", str(run), "fedplat runs show", "curves.png"):
        assert expected in result.out
    for file in ("job.toml", "events.jsonl", "model.safetensors", "best.safetensors", "plots/curves.png"):
        assert (run / file).is_file()


def test_json_is_the_last_line_of_stdout_and_holds_the_contract(fedplat):
    result = fedplat("simulate", *FAST, "--json", "--out", "mine")
    summary = json.loads(result.out.splitlines()[-1])
    assert summary.keys() >= JSON_KEYS
    assert summary["rounds"] == 3 and summary["clients"] == 8 and summary["run"] == "mine"
    assert summary["model_sha256"] == hashlib.sha256(Path("mine/model.safetensors").read_bytes()).hexdigest()


def test_quiet_prints_nothing_but_json(fedplat):
    result = fedplat("simulate", *FAST, "--quiet", "--json", "--out", "a")
    assert len(result.out.splitlines()) == 1 and result.err == ""
    assert fedplat("simulate", *FAST, "--quiet", "--out", "b").out == ""


def test_the_same_job_gives_the_same_model(fedplat):
    digests = {
        json.loads(fedplat("simulate", *FAST, "-q", "--json", "--out", f"r{i}").out)["model_sha256"] for i in range(2)
    }
    other = json.loads(fedplat("simulate", *FAST, "-q", "--json", "--set", "job.seed=5", "--out", "r2").out)
    assert len(digests) == 1 and other["model_sha256"] not in digests


def test_the_resolved_job_in_the_run_directory_runs_to_the_same_model(fedplat):
    first = json.loads(fedplat("simulate", *FAST, "-q", "--json", "--out", "one").out)
    again = json.loads(fedplat("simulate", "one/job.toml", "-q", "--json", "--out", "two").out)
    assert first["model_sha256"] == again["model_sha256"]


def test_job_init_check_simulate(fedplat):
    assert fedplat("job", "init", "mine.toml", "--set", "cohort.clients=8").code == 0
    assert load_job(Path("mine.toml")).cohort.clients == 8
    assert fedplat("job", "check", "mine.toml").out.startswith("ok: digits-demo, sha256 ")
    assert fedplat("job", "init", "mine.toml").code == 2


def test_job_schema_documents_every_key(fedplat):
    schema = json.loads(fedplat("job", "schema").out)
    for definition in schema["$defs"].values():
        for name, key in definition.get("properties", {}).items():
            assert "description" in key or "const" in key, name
    assert json.loads(fedplat("job", "schema", "--events").out) == json.loads(json.dumps(EVENT.json_schema()))


def test_job_run_config_carries_the_job_in_one_declared_key(fedplat):
    import tomllib

    config = tomllib.loads(fedplat("job", "run-config", "--set", "cohort.fraction=0.3").out)
    assert set(config) == {"job"}
    assert Job.from_canonical(config["job"]) == load_job(None, ["cohort.fraction=0.3"])
    declared = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert declared["tool"]["flwr"]["app"]["config"] == {"job": ""}


def test_job_run_config_solves_a_private_jobs_noise(fedplat):
    import tomllib

    private = ["privacy.unit=sample", "privacy.epsilon=4.0", "privacy.sample_rate=0.1", "local.steps=2", "job.rounds=3"]
    arguments = [word for setting in private for word in ("--set", setting)]
    job = Job.from_canonical(tomllib.loads(fedplat("job", "run-config", *arguments).out)["job"])
    asked = load_job(None, private)
    assert job.privacy.noise_multiplier == plan_privacy(asked).noise_multiplier == plan_privacy(job).noise_multiplier
    assert job.model_copy(update={"privacy": None}) == asked.model_copy(update={"privacy": None})
    assert 3.9 < plan_privacy(job).epsilon() <= 4.0
    refused = fedplat("job", "run-config", *arguments, "--set", "privacy.sample_rate=")
    assert refused.code == 2 and "privacy.sample_rate is missing" in refused.err and refused.out == ""


def test_data_show_draws_a_picture(fedplat):
    result = fedplat("data", "show", "--set", "data.partition.alpha=0.1", "--out", "skew.png")
    assert result.code == 0 and "client-0" in result.out
    assert Path("skew.png").read_bytes().startswith(b"\x89PNG")


def test_runs_list_show_compare_plot_tensorboard(fedplat):
    assert "no runs" in fedplat("runs", "list").out
    fedplat("simulate", *FAST, "--out", "runs/alpha")
    fedplat("simulate", *FAST, "--set", "local.lr=0.01", "--out", "runs/beta")
    assert [row["rounds"] for row in json.loads(fedplat("runs", "list", "--json").out)] == [3, 3]
    assert "alpha" in fedplat("runs", "list").out
    assert "test accuracy" in fedplat("runs", "show", "alpha").out
    assert "mean update norm" in fedplat("runs", "show", "beta", "--clients").out
    compared = fedplat("runs", "compare", "alpha", "beta", "--out", "both.png")
    assert "local.lr: 0.5  |  0.01" in compared.out and Path("both.png").is_file()
    Path("runs/alpha/plots/curves.png").unlink()
    assert "curves.png" in fedplat("runs", "plot", "alpha").out and Path("runs/alpha/plots/curves.png").is_file()
    assert fedplat("runs", "tensorboard", "alpha").code == 0
    assert list(Path("runs/alpha/tensorboard").glob("events.out*"))


def test_tensorboard_can_be_written_live(fedplat):
    fedplat("simulate", *FAST, "--tensorboard", "--out", "live")
    assert list(Path("live/tensorboard").glob("events.out*"))


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_shell_completion_is_offered(fedplat, shell, monkeypatch):
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    assert "complete" in fedplat("--show-completion", shell).out
