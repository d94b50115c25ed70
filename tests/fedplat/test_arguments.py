"""Arguments from a job file against a Python signature: accepted exactly when the call would be."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, Optional

import pytest

from fedplat.arguments import bind_arguments
from fedplat.errors import UsageError


def plain(
    width: int, rate: float = 0.1, name: str = "x", flag: bool = False, sizes: list[int] | None = None
) -> None: ...


def union(value: int | str, either: Optional[float] = None) -> None: ...  # noqa: UP045


def untyped(hidden=3) -> None: ...  # type: ignore[no-untyped-def]


def anything(value: Any, thing: object = None) -> None: ...


def choice(model: Literal["a", "b"] = "a", rows: Sequence[int] = (), table: dict[str, int] | None = None) -> None: ...


def open_ended(data_dir: str, width: int = 1, **others: Any) -> None: ...


def reserved(data_dir: str, hidden: int = 3) -> None: ...


def forward(width: "int" = 1) -> None: ...


def callbacks(
    width: int = 1,
    plain_fn: Callable[[int], str] = str,
    optional_fn: Callable[[int], str] | None = None,
    bare_fn: Callable = str,  # type: ignore[type-arg]
) -> None: ...


class Constructed:
    def __init__(self, data_dir: str, *, hidden: int = 3) -> None: ...


ACCEPTED = {
    "all given": (plain, {"width": 1, "rate": 0.5, "name": "n", "flag": True, "sizes": [1, 2]}),
    "defaults": (plain, {"width": 1}),
    "a whole number is a float": (plain, {"width": 1, "rate": 1}),
    "None where None is allowed": (plain, {"width": 1, "sizes": None}),
    "either side of a union": (union, {"value": "text", "either": 2}),
    "parameter without a type": (untyped, {"hidden": 4}),
    "Any takes anything": (anything, {"value": [1, {"a": None}], "thing": True}),
    "richer types are left to the constructor": (choice, {"model": "a", "rows": [1], "table": {"x": 1}}),
    "open-ended": (open_ended, {"width": 2, "whatever": "x"}),
    "reserved is filled in elsewhere": (reserved, {"hidden": 4}),
    "a class": (Constructed, {"hidden": 4}),
    "type given as text": (forward, {"width": 2}),
    "no callbacks needed": (callbacks, {"width": 2}),
}
REFUSED = {
    "typo": (plain, {"width": 1, "rat": 1}, "unknown argument 'rat' (did you mean 'rate'?)"),
    "unknown lists the valid ones": (reserved, {"zzz": 1}, "Valid: hidden"),
    "missing": (plain, {}, "missing argument width"),
    "text for a number": (plain, {"width": "1"}, "where.width must be int (got '1')"),
    "a fraction for a whole number": (plain, {"width": 1.5}, "where.width must be int (got 1.5)"),
    "true is not a number": (plain, {"width": True}, "where.width must be int (got True)"),
    "true is not a float": (plain, {"width": 1, "rate": True}, "where.rate must be float"),
    "a number is not true": (plain, {"width": 1, "flag": 1}, "where.flag must be bool (got 1)"),
    "None where it is not allowed": (plain, {"width": None}, "where.width must be int (got None)"),
    "wrong for both sides of a union": (union, {"value": 1.5}, "where.value must be int or str (got 1.5)"),
    "text is not a list": (plain, {"width": 1, "sizes": "12"}, "where.sizes must be list (got '12')"),
    "reserved": (reserved, {"data_dir": "/etc"}, "data_dir is fedplat's to set"),
    "reserved of an open-ended target": (open_ended, {"data_dir": "/etc"}, "data_dir"),
    "positional name of a class": (Constructed, {"self": 1}, "unknown argument 'self'"),
    "callback": (callbacks, {"plain_fn": "print"}, "plain_fn"),
    "optional callback": (callbacks, {"optional_fn": "print"}, "optional_fn"),
    "bare callback": (callbacks, {"bare_fn": "print"}, "bare_fn"),
}


@pytest.mark.parametrize(("target", "arguments"), ACCEPTED.values(), ids=ACCEPTED.keys())
def test_arguments_that_the_signature_takes_are_accepted(
    target: Callable[..., object], arguments: dict[str, Any]
) -> None:
    bind_arguments(target, arguments, "where", reserved={"data_dir"})


@pytest.mark.parametrize(("target", "arguments", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_arguments_that_the_signature_refuses_are_named(
    target: Callable[..., object], arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError) as refusal:
        bind_arguments(target, arguments, "where", reserved={"data_dir"})
    assert message in str(refusal.value)
    assert str(refusal.value).startswith("where")


def test_parameters_that_a_job_file_can_not_express_are_not_offered() -> None:
    with pytest.raises(UsageError) as refusal:
        bind_arguments(callbacks, {"zzz": 1}, "where")
    assert str(refusal.value).endswith("Valid: width")
