"""What a sweep runs: axes, their cartesian product with the seeds, one readable name per run.

    grid = ("local.lr=0.01,0.1", "data.partition={kind='iid'},{kind='shards'}")
    points = plan_points(SweepSpec(base=given_keys(job), grid=grid, seeds=3))      # 2 × 2 × 3 runs

An axis is a key of the job and the values it takes; a setting is one value of each axis; a point is a setting
with a seed, and is one run. An axis may also be a whole section, whose keys then vary together:
`server={strategy='FedAvg'},{strategy='FedAdam',args={eta=0.05}}`.

The law kept here: the names of a sweep are unique and safe as file names, and no two points are the same job.
Planning is pure and imports neither torch nor Flower, so that a typo is answered at once.
"""

import copy
import dataclasses
import hashlib
import itertools
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedplat.errors import FedplatError, UsageError
from fedplat.job import Job, validate_job

LONGEST_NAME = 100
EXAMPLE = "for example --grid local.lr=0.01,0.1"
_QUOTED = re.compile(r'"(?:\\.|[^"\\])*"|\'[^\']*\'', re.DOTALL)
_UNSAFE = re.compile(r"[^A-Za-z0-9._+=-]+")


@dataclass(frozen=True)
class Axis:
    """A key of the job, or a whole section, and the values it takes."""

    key: str
    values: tuple[Any, ...]


@dataclass(frozen=True)
class SweepSpec:
    """A sweep as it was asked for. The base holds only the keys that were given, so that an axis over
    `data.partition.kind` doesn't meet the default keys of another kind."""

    base: Mapping[str, Any]
    grid: tuple[str, ...]
    """One text per axis, as on the command line: TOML tables would not keep the order of keys, and names need it."""
    seeds: int

    @property
    def axes(self) -> tuple[Axis, ...]:
        return parse_axes(self.grid)


@dataclass(frozen=True)
class Point:
    """One run of a sweep."""

    name: str
    setting: str
    """Name of the grid point; all its seeds share it."""
    values: Mapping[str, Any]
    """Axis key → value."""
    seed: int
    job: Job


def given_keys(job: Job) -> dict[str, Any]:
    """The job without its defaults."""
    return job.model_dump(mode="json", exclude_unset=True)


def parse_axes(texts: Sequence[str]) -> tuple[Axis, ...]:
    axes = tuple(parse_axis(text) for text in texts)
    for earlier, later in itertools.combinations(axes, 2):
        if earlier.key == later.key:
            raise UsageError(f"--grid {later.key} is given twice. Put all its values into one --grid")
    return axes


def parse_axis(text: str) -> Axis:
    """Parse `section.key=value,value`; each value is TOML, or plain text where it is not valid TOML."""
    written, equals, raw = text.partition("=")
    parts = [part.strip() for part in written.split(".")]
    if not equals or not all(parts):
        raise UsageError(f"--grid {text}: write section.key=value,value, {EXAMPLE}")
    values = tuple(_parse_value(item.strip(), text) for item in split_values(raw))
    if len(parts) == 1 and not all(isinstance(value, dict) for value in values):
        raise UsageError(f"--grid {text}: '{parts[0]}' is a section: write section.key=value,value, {EXAMPLE}")
    if len({repr(value) for value in values}) < len(values):
        raise UsageError(f"--grid {text}: a value is given twice. To repeat runs, use --seeds")
    return Axis(".".join(parts), values)


def split_values(raw: str) -> list[str]:
    """Split at the commas that stand outside brackets and quotes."""
    items, depth, position = [""], 0, 0
    while position < len(raw):
        # In plain text an apostrophe is only an apostrophe: a TOML string starts a value or stands in brackets.
        quoted = _QUOTED.match(raw, position) if depth or not items[-1].strip() else None
        token = quoted.group() if quoted else raw[position]
        position += len(token)
        if token == "," and depth == 0:
            items.append("")
            continue
        items[-1] += token
        if not quoted:
            depth = max(0, depth + (token in "[{") - (token in "]}"))
    return items


def _parse_value(item: str, text: str) -> Any:
    if not item:
        raise UsageError(f"--grid {text}: a value is missing. An empty text is written ''")
    try:
        parsed = tomllib.loads(f"value = {item}")
    except tomllib.TOMLDecodeError as error:
        if item[0] in "[{'\"":
            raise UsageError(f"--grid {text}: {item} is not valid TOML: {error}") from None
        return item
    return parsed["value"] if len(parsed) == 1 else item


def plan_points(spec: SweepSpec) -> tuple[Point, ...]:
    """Every setting with every seed, each a valid job."""
    axes = spec.axes
    if not axes and spec.seeds == 1:
        raise UsageError(f"nothing varies in this sweep: give --grid, {EXAMPLE}, or --seeds 3")
    first_seed = validate_job(spec.base, "the sweep's base job").job.seed
    points = []
    for setting, values in zip(setting_names(axes), settings(axes), strict=True):
        for seed in range(first_seed, first_seed + spec.seeds):
            name = f"{setting},seed={seed}" if values else f"seed={seed}"
            points.append(Point(name, setting, values, seed, _point_job(spec, name, values, first_seed, seed)))
    _require_comparable(points)
    return tuple(points)


def settings(axes: Sequence[Axis]) -> Iterator[dict[str, Any]]:
    """The cartesian product; the last axis varies fastest."""
    for values in itertools.product(*(axis.values for axis in axes)):
        yield {axis.key: value for axis, value in zip(axes, values, strict=True)}


def _point_job(spec: SweepSpec, name: str, values: Mapping[str, Any], first_seed: int, seed: int) -> Job:
    table = copy.deepcopy(dict(spec.base))
    for key, value in values.items():
        _assign(table, key, value)
    job = validate_job(table, f"sweep point {name}")
    if job.job.seed != first_seed:
        raise UsageError("job.seed can't be in a --grid: use --set job.seed=FIRST and --seeds NUMBER")
    return validate_job({**table, "job": {**table.get("job", {}), "seed": seed}}, f"sweep point {name}")


def _assign(table: dict[str, Any], key: str, value: Any) -> None:
    *sections, last = key.split(".")
    for part in sections:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise UsageError(f"--grid {key}: '{part}' is a value, not a section")
    # A section's other keys stay; a table inside a section (a partition) is replaced whole, as --set does.
    table[last] = {**table.get(last, {}), **copy.deepcopy(value)} if not sections else copy.deepcopy(value)


def _require_comparable(points: Sequence[Point]) -> None:
    if len({point.job.evaluation.metric for point in points}) > 1:
        raise UsageError("evaluation.metric can't be in a --grid: one metric compares all points")
    names: dict[str, str] = {}
    for point in points:
        other = names.setdefault(point.job.digest, point.name)
        if other != point.name:
            raise UsageError(f"sweep points {other} and {point.name} are the same job. Remove one of the values")


def check_points(
    points: Sequence[Point], prepare: Callable[[Job], Job], checked: Callable[[Point], None] = lambda point: None
) -> tuple[Point, ...]:
    """Prepare every job for real (data, strategy, model), so that nothing runs if the last of them can't."""
    ready = []
    for point in points:
        try:
            ready.append(dataclasses.replace(point, job=prepare(point.job)))
        except FedplatError as error:
            raise UsageError(f"sweep point {point.name}: {error}") from None
        checked(point)
    return tuple(ready)


def setting_names(axes: Sequence[Axis]) -> list[str]:
    """`local.lr=0.01,cohort.fraction=0.1`; where that is too long or taken, it ends in a hash of the values."""
    names: list[str] = []
    taken: set[str] = set()
    for values in settings(axes):
        name = ",".join(_UNSAFE.sub("_", label(key, value)) for key, value in values.items()) or "base"
        if len(name) > LONGEST_NAME or name.casefold() in taken:  # some file systems ignore case
            name = f"{name[: LONGEST_NAME - 9]}~{hashlib.sha256(repr(values).encode()).hexdigest()[:8]}"
        taken.add(name.casefold())
        names.append(name)
    return names


def label(key: str, value: Any) -> str:
    """`local.lr=0.01`, and for a table its keys: `data.partition.kind=shards+per_client=2`."""
    text = value_text(value)
    return f"{key}.{text}" if isinstance(value, dict) and value else f"{key}={text}"


def value_text(value: Any) -> str:
    """A value as short text, for names and tables."""
    if isinstance(value, dict):
        return "+".join(label(key, inner) for key, inner in value.items()) or "empty"
    if isinstance(value, list | tuple):
        return "+".join(value_text(inner) for inner in value) or "empty"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) or "empty"
