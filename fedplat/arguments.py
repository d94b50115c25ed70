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
    offered = {n: p for n, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    offered = {n: p for n, p in offered.items() if n not in reserved and not _is_callable_type(p.annotation)}
    for name, value in arguments.items():
        if name in offered:
            _check_type(value, offered[name].annotation, f"{where}.{name}")
        elif not open_ended:
            raise UsageError(f"{where}: {unknown_name('argument', name, offered)}")
    missing = [n for n, p in offered.items() if p.default is p.empty and n not in arguments]
    if missing:
        raise UsageError(f"{where}: missing argument {', '.join(missing)}")


def _is_callable_type(annotation: Any) -> bool:
    members = typing.get_args(annotation) or (annotation,)
    return any(typing.get_origin(m) is Callable or m is Callable for m in _flatten(members))


def _flatten(members: tuple[Any, ...]) -> list[Any]:
    flat: list[Any] = []
    for member in members:
        origin = typing.get_origin(member)
        is_union = origin in (types.UnionType, typing.Union)
        flat += _flatten(typing.get_args(member)) if is_union else [origin or member]
    return flat


def _check_type(value: Any, annotation: Any, where: str) -> None:
    """Check plain scalar and container annotations; leave anything richer to the constructor."""
    allowed = _flatten((annotation,))
    if not all(isinstance(t, type) for t in allowed):
        return
    if float in allowed:
        allowed.append(int)
    boolean_given = isinstance(value, bool) and bool not in allowed and object not in allowed
    if boolean_given or not isinstance(value, tuple(allowed)):
        names = " or ".join(t.__name__ for t in allowed if t is not type(None))
        raise UsageError(f"{where} must be {names} (got {value!r})")
