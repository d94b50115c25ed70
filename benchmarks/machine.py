"""The machine a benchmark ran on, and the dated result files that name it.

Every benchmark measures rows: one number, its unit, the limit it must stay under, and the numbers it is to
be read beside. `write_results` puts them in `benchmarks/results/<date>-<name>.json`, with the same as a table
in `.md`.
"""

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from importlib.metadata import version
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Machine:
    date: str
    cpu: str
    cores: int
    memory_gib: float
    system: str
    load: float
    """Load average of the last minute, when the benchmark started: who else was using the cores."""
    python: str
    torch: str
    flwr: str
    numpy: str

    def __str__(self) -> str:
        return (
            f"{self.date}: {self.cpu}, {self.cores} cores, {self.memory_gib:g} GiB, {self.system}, load {self.load:g}; "
            f"Python {self.python}, torch {self.torch}, flwr {self.flwr}, numpy {self.numpy}"
        )


def describe_machine() -> Machine:
    return Machine(
        date=date.today().isoformat(),
        cpu=_cpu_model(),
        cores=len(os.sched_getaffinity(0)),
        memory_gib=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        system=f"{platform.system()} {platform.release()}",
        load=round(os.getloadavg()[0], 2),
        python=platform.python_version(),
        torch=version("torch"),
        flwr=version("flwr"),
        numpy=version("numpy"),
    )


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.machine()


@dataclass(frozen=True)
class Row:
    """One measured number beside its limit and its peers, all in the same unit."""

    what: str
    value: float
    unit: str = ""
    limit: float | None = None
    """The goal: the value must not be larger."""
    beside: Mapping[str, float] = field(default_factory=dict)
    at_least: float | None = None
    """The goal: the value must not be smaller."""

    @property
    def met(self) -> bool | None:
        if self.limit is None and self.at_least is None:
            return None
        return (self.limit is None or self.value <= self.limit) and (
            self.at_least is None or self.value >= self.at_least
        )

    def cells(self) -> tuple[str, str, str, str]:
        """What, measured, goal, beside."""
        goals = (("≥", self.at_least), ("≤", self.limit))
        bounds = [f"{sign} {_number(bound)}" for sign, bound in goals if bound is not None]
        goal = f"{', '.join(bounds)} {'met' if self.met else 'MISSED'}" if bounds else ""
        beside = ", ".join(f"{name} {_number(value)}" for name, value in self.beside.items())
        return self.what, f"{_number(self.value)} {self.unit}".strip(), goal, beside

    def as_json(self) -> dict[str, object]:
        return asdict(self) | {"met": self.met}


def _number(value: float) -> str:
    if float(value).is_integer():
        return f"{int(value):,}"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


@dataclass(frozen=True)
class Section:
    """Rows that were measured together, and in one paragraph how."""

    title: str
    how: str
    rows: Sequence[Row]


HEADINGS = ("what", "measured", "goal", "beside")


def print_section(section: Section) -> None:
    lines = [HEADINGS, *(row.cells() for row in section.rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADINGS))]
    print(f"\n{section.title}\n  {section.how}")
    for line in lines:
        print("  " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def write_results(name: str, machine: Machine, sections: Sequence[Section], directory: Path = RESULTS) -> Path:
    """Write `<date>-<name>.json` and the same as a table in `.md`; returns the path of the former."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{machine.date}-{name}.json"
    content = {"name": name, "machine": asdict(machine), "sections": [_section_json(s) for s in sections]}
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    path.with_suffix(".md").write_text(_markdown(name, machine, sections), encoding="utf-8")
    return path


def _section_json(section: Section) -> dict[str, object]:
    return {"title": section.title, "how": section.how, "rows": [row.as_json() for row in section.rows]}


def _markdown(name: str, machine: Machine, sections: Sequence[Section]) -> str:
    parts = [f"# {name}, {machine.date}", str(machine) + ".", f"Run it: `python -m benchmarks.{name}`."]
    for section in sections:
        lines = [HEADINGS, ("---",) * len(HEADINGS), *(row.cells() for row in section.rows)]
        parts += [f"## {section.title}", section.how, "\n".join(f"| {' | '.join(line)} |" for line in lines)]
    return "\n\n".join(parts) + "\n"
