"""Who takes part in `benchmarks.simulation`, how each is started, and how its rounds are read back.

Every contender is a fresh tree of processes with the same data, one torch thread per process, no evaluation and no
checkpoint before the last round.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

import tomli_w

from benchmarks.process_tree import RunError, run_tree
from benchmarks.workloads import LR, Workload

ROOT = Path(__file__).resolve().parent.parent
PFL = "pfl==0.6.*"
PFL_VENV = ROOT / ".venv-pfl"
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "PYTHONWARNINGS": "ignore",
}
"""Nobody phones home while being measured."""


@dataclass(frozen=True)
class Rounds:
    """What a contender reports about itself."""

    ends: Sequence[float]
    """Seconds since the epoch at which each round's new global model was ready."""
    loss: float


@dataclass(frozen=True)
class Measurement:
    steady_per_s: float
    """Clients per second, without the first round."""
    whole_per_s: float
    """Clients per second from the start of the process to its end."""
    first_round_s: float
    """From the start of the process to the end of the first round."""
    after_s: float
    """From the end of the last round to the end of the process."""
    loss: float
    peak_pss_mb: float
    processes: int
    others_cores: float


@dataclass(frozen=True)
class Contender:
    """`command` starts it for (workload, rounds, scratch folder); `read` finds its rounds in (stdout, folder)."""

    name: str
    title: str
    command: Callable[[Workload, int, Path], list[str]]
    read: Callable[[Workload, str, Path], Rounds]
    engine: str | None = None
    """The engine, if this is fedplat."""

    def measure(self, workload: Workload, rounds: int, timeout_s: float, memory: bool) -> Measurement:
        """One run; memory is watched on request only, because watching slows what is watched."""
        # Ray's socket lies below this folder, and the path of a socket has at most 107 characters.
        with tempfile.TemporaryDirectory(prefix="fb", dir="/tmp", ignore_cleanup_errors=True) as name:
            folder = Path(name)
            env = {
                **os.environ, **QUIET, "PYTHONPATH": str(ROOT), "RAY_TMPDIR": name, "FLWR_HOME": str(folder / "flwr"),
            }  # fmt: skip
            command = self.command(workload, rounds, folder)
            tree = run_tree(command, env, folder, timeout_s, memory)
            result = self.read(workload, tree.stdout, folder)
        if len(result.ends) != rounds:
            raise RunError(f"{self.title}: {len(result.ends)} of {rounds} rounds were finished\n{tree.stdout[-2000:]}")
        return Measurement(
            steady_per_s=workload.cohort * (rounds - 1) / (result.ends[-1] - result.ends[0]),
            whole_per_s=workload.cohort * rounds / tree.wall_s,
            first_round_s=result.ends[0] - tree.started,
            after_s=tree.started + tree.wall_s - result.ends[-1],
            loss=result.loss,
            peak_pss_mb=tree.peak_pss_bytes / 1e6,
            processes=tree.peak_processes,
            others_cores=tree.others_cores,
        )


# --- the peers ------------------------------------------------------------------------------------


def bare_loop(processes: int) -> Contender:
    name, title = ("bare", "bare PyTorch loop") if processes == 1 else ("bare2", f"bare loop, {processes} processes")
    return Contender(name, title, _peer(sys.executable, "bare_loop", [str(processes)]), _read_line)


def flower_ray(processes: int) -> Contender:
    return Contender("ray", "Flower + Ray", _peer(sys.executable, "flower_ray", [str(processes)]), _read_line)


def pfl_fedavg(processes: int, python: str) -> Contender:
    """pfl runs on several processes under torchrun, with gloo between them."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    if processes == 1:
        return Contender("pfl", "pfl", _peer(python, "pfl_fedavg"), _read_line)
    return Contender("pfl2", f"pfl, {processes} processes", _peer(python, "pfl_fedavg", launcher=launcher), _read_line)


def _peer(
    python: str, module: str, arguments: Sequence[str] = (), launcher: Sequence[str] = ()
) -> Callable[[Workload, int, Path], list[str]]:
    def command(workload: Workload, rounds: int, folder: Path) -> list[str]:
        return [python, *launcher, "-m", f"benchmarks.peers.{module}", workload.key, str(rounds), *arguments]

    return command


def _read_line(workload: Workload, stdout: str, folder: Path) -> Rounds:
    lines = [line for line in stdout.splitlines() if line.startswith('{"round_ends"')]
    if not lines:
        raise RunError(f"no result on standard output:\n{stdout[-2000:]}")
    outcome = json.loads(lines[-1])
    return Rounds(outcome["round_ends"], outcome["loss"])


def pfl_python(given: str | None) -> str:
    """The interpreter with pfl. It needs an environment of its own, because it wants an older dp-accounting."""
    python = Path(given) if given else PFL_VENV / "bin" / "python"
    if not given and not python.exists():
        print(f"making {PFL_VENV} for {PFL} …")
        subprocess.run([sys.executable, "-m", "venv", str(PFL_VENV)], check=True)
    if subprocess.run([str(python), "-c", "import pfl.model.pytorch"], stderr=subprocess.DEVNULL).returncode != 0:
        if given:
            raise SystemExit(f"error: --pfl-python {given}: pfl can't be imported. Leave the option out to install it")
        torch = f"torch=={version('torch').partition('+')[0]}"  # the version that everybody else is measured with
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", torch, PFL], check=True)
    return str(python)


# --- fedplat --------------------------------------------------------------------------------------


def fedplat(engine: str, name: str = "", settings: Mapping[str, Mapping[str, object]] | None = None) -> Contender:
    """One engine of ours, through the command line; `settings` are merged into its job."""

    def command(workload: Workload, rounds: int, folder: Path) -> list[str]:
        job = job_table(workload, rounds, engine)
        for section, values in (settings or {}).items():
            job[section] = {**job[section], **values}
        file = folder / "job.toml"
        file.write_text(tomli_w.dumps(job), encoding="utf-8")
        return [sys.executable, "-m", "fedplat", "simulate", str(file), "--out", str(folder / "run"), "--json"]

    return Contender(name or engine, f"fedplat {engine}", command, _read_run, engine)


def checkpointed(contender: Contender) -> Contender:
    """The same engine with a checkpoint after every round, which is fedplat's default."""
    assert contender.engine is not None
    variant = fedplat(contender.engine, f"{contender.name}+checkpoints", {"server": {"checkpoint_every": 1}})
    return replace(variant, title=f"{contender.title}, a checkpoint every round")


def job_table(workload: Workload, rounds: int, engine: str) -> dict[str, dict[str, object]]:
    return {
        "job": {"name": "benchmark", "rounds": rounds},
        "task": {"name": "benchmarks.synthetic:Synthetic", "args": {"workload": workload.key}},
        "data": {"partition": {"kind": "range"}},
        "cohort": {"clients": workload.clients, "size": workload.cohort, "min_replies": workload.cohort},
        "local": {"lr": LR, "batch_size": workload.batch_size, "epochs": 1},
        "server": {"checkpoint_every": rounds},
        "evaluation": {"server": False},
        "simulation": {"engine": engine},
    }


def _read_run(workload: Workload, stdout: str, folder: Path) -> Rounds:
    events = [json.loads(line) for line in (folder / "run" / "events.jsonl").read_text(encoding="utf-8").splitlines()]
    ends = [event["time"] for event in events if event["event"] == "round_finished"]
    return Rounds(ends, loss_of(workload, folder / "run" / "model.safetensors"))


def loss_of(workload: Workload, *file: Path) -> float:
    """Loss of a model's file, or of the initial model; in a process of its own, as the harness stays free of torch."""
    command = [sys.executable, "-m", "benchmarks.synthetic", workload.key, *map(str, file)]
    return float(subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.PIPE, text=True).stdout)
