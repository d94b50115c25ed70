"""Check a table of arguments from a job file against a Python signature, before anything starts.

Strategies and tasks are classes with typed constructors. A wrong name or a wrong type in the job
file becomes one sentence that names the key, instead of a TypeError in the middle of a run.
"""

import inspect
import types
import typing
from collections.abc import Callable, Collection, Mapping
from typing import Any

from fedplat.errors import UsageError, unknown_name


def bind_arguments(
    target: Callable[..., object], arguments: Mapping[str, Any], where: str, *, reserved: Collection[str] = ()
) -> None:
    """Raise UsageError unless `target(**arguments)` would be accepted.

    `reserved` names parameters that fedplat fills in itself; they are not offered to the job.
    """
    parameters = inspect.signature(target).parameters
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    named = {n: p for n, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    offered = {n: p for n, p in named.items() if n not in reserved and not _is_callable_type(p.annotation)}
    for name, value in arguments.items():
        if name in reserved:
            raise UsageError(f"{where}.{name} is fedplat's to set: remove it")
        if name in offered:
            _check_type(value, offered[name].annotation, f"{where}.{name}")
        elif name in named or not open_ended:
            problem = (
                unknown_name("argument", name, offered) if offered else f"unknown argument '{name}': there are none"
            )
            raise UsageError(f"{where}: {problem}")
    missing = [n for n, p in offered.items() if p.default is p.empty and n not in arguments]
    if missing:
        raise UsageError(f"{where}: missing argument {', '.join(missing)}")


def _is_callable_type(annotation: Any) -> bool:
    return Callable in _members(annotation)


def _members(annotation: Any) -> list[Any]:
    """The types that an annotation allows, with unions taken apart: `dict[str, int] | None` → [dict, NoneType]."""
    origin = typing.get_origin(annotation)
    if origin in (types.UnionType, typing.Union):
        return [member for part in typing.get_args(annotation) for member in _members(part)]
    return [origin or annotation]


_CHECKED = (bool, int, float, str, list, tuple, dict, type(None))


def _check_type(value: Any, annotation: Any, where: str) -> None:
    """Check plain scalar and container annotations; leave anything richer to the constructor."""
    allowed = _members(annotation)
    if not all(member in _CHECKED for member in allowed):
        return
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    fits = any(type(value) is member for member in allowed) or (is_number and type(value) is int and float in allowed)
    if not fits:
        names = " or ".join(member.__name__ for member in allowed if member is not type(None))
        raise UsageError(f"{where} must be {names} (got {value!r})")
