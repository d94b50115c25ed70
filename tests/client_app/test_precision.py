"""Autocast training. bf16 on a CPU needs instructions that oneDNN must be told of before torch is loaded,
so these run in a process of their own."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

SCRIPT = """
import json, sys
import torch
from client_app.local import LocalTrainer
from fedplat.job import validate_job
from fedplat.task import Examples
from fedplat.tasks import load_task

torch.set_num_threads(1)
results = []
for case in json.loads(sys.argv[1]):
    job = validate_job({"task": {"name": "cancer"}, "local": case["local"]}, "test")
    task = load_task(job)
    torch.manual_seed(0)
    model = task.model()
    start = torch.cat([p.detach().flatten().clone() for p in model.parameters()])
    data = task.data("train")[slice(0, 64)]
    data = Examples(data.inputs * case.get("scale", 1.0), data.targets)
    trainer = LocalTrainer(job, task, model, torch.device("cpu"))
    result = trainer.train(data, job.local.lr, torch.Generator().manual_seed(1))
    end = torch.cat([p.detach().flatten() for p in model.parameters()])
    results.append({
        "finite": bool(torch.isfinite(end).all()), "moved": float((end - start).norm()), "steps": result.steps,
        "loss": result.metrics["loss"], "dtypes": sorted({str(p.dtype) for p in model.parameters()}),
        "weights": end.tolist(),
    })
print(json.dumps(results))
"""


def run(*cases: dict[str, Any]) -> list[dict[str, Any]]:
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(cases)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    results: list[dict[str, Any]] = json.loads(done.stdout)
    return results


def distance(one: dict[str, Any], other: dict[str, Any]) -> float:
    pairs = zip(one["weights"], other["weights"], strict=True)
    return float(sum((a - b) ** 2 for a, b in pairs) ** 0.5)


@pytest.fixture(scope="module")
def trained() -> dict[str, dict[str, Any]]:
    """Ten epochs in each precision, once plain and once with the proximal term and clipping."""
    common = {"lr": 0.1, "batch_size": 16, "epochs": 10}
    extra = {"proximal_mu": 0.1, "clip_norm": 0.2, "accumulate": 2}
    precisions = ["fp32", "bf16", "fp16"]
    cases = [{"local": common | {"precision": p} | more} for more in ({}, extra) for p in precisions]
    names = [p + suffix for suffix in ("", " with extras") for p in precisions]
    return dict(zip(names, run(*cases), strict=True))


@pytest.mark.parametrize("precision", ["bf16", "fp16", "bf16 with extras", "fp16 with extras"])
def test_autocast_trains_to_finite_fp32_weights_near_those_of_fp32(
    trained: dict[str, dict[str, Any]], precision: str
) -> None:
    low, full = trained[precision], trained[precision.replace("bf16", "fp32").replace("fp16", "fp32")]
    assert low["finite"]
    assert low["dtypes"] == ["torch.float32"]
    assert low["steps"] == full["steps"]
    assert low["loss"] == pytest.approx(full["loss"], rel=0.05)
    assert distance(low, full) < 0.1 * full["moved"]
    assert low["weights"] != full["weights"]


def test_first_step_of_fp16_is_taken_also_for_large_inputs() -> None:
    """A client with one step a round would otherwise never train: the loss scale starts afresh in every round."""
    local = {"lr": 0.001, "batch_size": 1, "steps": 1}
    cases = [{"local": local | {"precision": p}, "scale": 30.0} for p in ("fp32", "fp16")]
    full, low = run(*cases)
    assert full["moved"] > 0
    assert low["finite"]
    assert low["steps"] == 1
    assert low["moved"] == pytest.approx(full["moved"], rel=0.05)
