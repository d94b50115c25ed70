"""A job file that explains itself: every key with its description as a comment."""

import textwrap
from collections.abc import Iterator

import tomli_w
from pydantic import BaseModel

from fedplat.job import Job
from fedplat.privacy_section import PrivacySection

HEADER = """\
# A fedplat job. Keys that are commented out have no value by default.
#   fedplat job check THIS-FILE     check it
#   fedplat simulate THIS-FILE      run it on virtual clients
"""
EXAMPLE_PRIVACY = PrivacySection(unit="sample", epsilon=4.0)


def commented_toml(job: Job) -> str:
    sections = [_section(name, getattr(job, name)) for name in Job.model_fields if getattr(job, name) is not None]
    absent = "" if job.privacy is not None else _commented_out(_section("privacy", EXAMPLE_PRIVACY))
    return HEADER + "".join(sections) + absent


def _commented_out(section: str) -> str:
    """A section that the job doesn't have, one `#` away from being there."""
    return "\n".join(f"#{line}" if line else "" for line in section.splitlines()) + "\n"


def _section(path: str, model: BaseModel) -> str:
    """One table: plain keys first, then sub-tables, as TOML wants it."""
    summary = (type(model).__doc__ or "").strip().splitlines()[0]
    lines = ["", f"# {summary}", f"[{path}]", *_keys(model)]
    tables = [(name, getattr(model, name)) for name in type(model).model_fields]
    subsections = [_section(f"{path}.{name}", value) for name, value in tables if isinstance(value, BaseModel)]
    return "\n".join(lines) + "\n" + "".join(subsections)


def _keys(model: BaseModel) -> Iterator[str]:
    values = model.model_dump(mode="json")
    for name, field in type(model).model_fields.items():
        if isinstance(getattr(model, name), BaseModel):
            continue
        yield from textwrap.wrap(field.description or "", 100, initial_indent="# ", subsequent_indent="#   ")
        yield f"# {name} =" if values[name] is None else f"{name} = {_inline(values[name])}"


def _inline(value: object) -> str:
    if isinstance(value, dict):
        pairs = ", ".join(f"{tomli_w.dumps({k: 0}).rsplit(' = ', 1)[0]} = {_inline(v)}" for k, v in value.items())
        return f"{{ {pairs} }}" if pairs else "{}"
    if isinstance(value, list):
        return f"[{', '.join(_inline(v) for v in value)}]"
    return tomli_w.dumps({"v": value}).split("=", 1)[1].strip()
