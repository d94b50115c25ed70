"""Turn pydantic's validation errors into sentences a person can act on.

cohort.fraction must be ≤ 1 (got 2.0)
unknown key 'cohort.fractoin' (did you mean 'cohort.fraction'?)
"""

from collections.abc import Iterator
from typing import get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from fedplat.errors import nearest, unknown_name
from fedplat.partition_spec import KINDS

_BOUNDS = {
    "greater_than": ("gt", ">"),
    "greater_than_equal": ("ge", "≥"),
    "less_than": ("lt", "<"),
    "less_than_equal": ("le", "≤"),
}


def describe_errors(error: ValidationError, model: type[BaseModel]) -> str:
    """All problems of a job, one sentence each."""
    return "; ".join(_describe(detail, model) for detail in error.errors())


def _describe(detail: ErrorDetails, model: type[BaseModel]) -> str:
    key = _dotted(detail["loc"])
    kind, context, given = detail["type"], detail.get("ctx", {}), detail.get("input")
    if kind == "extra_forbidden":
        return _unknown_key(key, _valid_keys(model, detail["loc"]))
    if kind in _BOUNDS:
        field, sign = _BOUNDS[kind]
        return f"{key} must be {sign} {context[field]} (got {given!r})"
    if kind == "union_tag_invalid":
        return f"{key}.kind: {unknown_name('partitioner', str(context['tag']), KINDS)}"
    if kind == "union_tag_not_found":
        return f"{key} needs kind = one of {', '.join(KINDS)}"
    if kind == "literal_error":
        return f"{key} must be one of {context['expected']} (got {given!r})"
    if kind == "value_error":
        return f"{key}: {context['error']}" if key else str(context["error"])
    message = detail["msg"][0].lower() + detail["msg"][1:]
    return f"{key}: {message} (got {given!r})"


def _dotted(location: tuple[int | str, ...]) -> str:
    """The key as a person wrote it: pydantic's path also names the members of unions."""
    parts = [str(part) for part in location]
    if parts[:2] == ["data", "partition"] and len(parts) > 2 and parts[2] in KINDS:
        del parts[2]
    if len(parts) > 1 and parts[1] == "args":
        del parts[3:]
    return ".".join(parts)


def _valid_keys(model: type[BaseModel], location: tuple[int | str, ...]) -> list[str]:
    """Every key of a job, including those of the kind of partition that was chosen."""
    kind = KINDS.get(str(location[2])) if location[:2] == ("data", "partition") and len(location) > 2 else None
    return [*_all_keys(model), *(f"data.partition.{name}" for name in (kind.model_fields if kind else ()))]


def _all_keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield prefix + name
        for part in (field.annotation, *get_args(field.annotation)):  # a section, or one that may be absent
            if isinstance(part, type) and issubclass(part, BaseModel):
                yield from _all_keys(part, f"{prefix}{name}.")


def _unknown_key(key: str, valid: list[str]) -> str:
    section, _, name = key.rpartition(".")
    siblings = [k.rpartition(".")[2] for k in valid if k.rpartition(".")[0] == section]
    elsewhere = next((k for k in valid if k.rpartition(".")[2] == name), None)
    sibling = nearest(name, siblings)
    guess = elsewhere or (f"{section}.{sibling}".lstrip(".") if sibling else None)
    hint = f" (did you mean '{guess}'?)" if guess else ""
    place = f"in [{section}]" if section else "sections"
    return f"unknown key '{key}'{hint}" + (f". Valid {place}: {', '.join(siblings)}" if siblings else "")
