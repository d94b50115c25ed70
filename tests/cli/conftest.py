"""Call the command line in this process, as `fedplat` would, and see what a person sees."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from fedplat.cli import main

FAST = [
    "--set",
    "job.rounds=3",
    "--set",
    "cohort.clients=8",
    "--set",
    "task.args.hidden=8",
    "--set",
    "local.epochs=1",
    "--engine",
    "serial",
]


@dataclass
class Result:
    code: int
    out: str
    err: str


@pytest.fixture
def fedplat(monkeypatch, capsys, tmp_path: Path) -> Callable[..., Result]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDPLAT_RUNS", raising=False)
    monkeypatch.setenv("COLUMNS", "200")

    def call(*arguments: object) -> Result:
        monkeypatch.setattr(sys, "argv", ["fedplat", *map(str, arguments)])
        capsys.readouterr()
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return call
