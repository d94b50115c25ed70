"""Privacy events: what a mechanism did to the data, in the terms of dp-accounting's `DpEvent`, and their JSON form.

The ledger and the run directory keep events, never ε: ε is computed from them, by more than one accountant
(`privacy.accounting`). The JSON form is canonical (one text per event, see `fedplat.canonical`) and closed: kinds,
keys and ranges are checked in both directions, so what was written can be read, and nothing else can.

A noise multiplier is the standard deviation of the noise over the clip norm C: the most that one record (or one
client, at that level) adds to a sum. It never includes the factor 2 of replace-one; `privacy.accountants.support`
puts that in, once.

There is no event for shuffled batches: no accountant here has a proof for them (Chua et al. 2024 show how far they are
from Poisson sampling). Account them without amplification, as `gaussian(noise_multiplier, epochs)`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from dp_accounting import dp_event
from dp_accounting.dp_event import DpEvent
from scipy import stats

from fedplat import canonical

INFINITY = "infinity"
"""JSON has no infinity; the shape of a Poisson number of repetitions is one."""
MAX_DEPTH = 16
MAX_COUNT = 10**12
MAX_TERMS = 100_000

Read = Callable[[str, Any, int], Any]
"""Turns a JSON value into a field of an event, or raises ValueError; gets the field's name and the depth."""


def _real(low: float, high: float = math.inf, *, open_low: bool = True) -> Read:
    def read(name: str, value: Any, _depth: int) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"{name} must be a finite number (got {value!r})")
        if value > high or value < low or (open_low and value == low):
            raise ValueError(f"{name} must be in {'(' if open_low else '['}{low:g}, {high:g}] (got {value!r})")
        return float(value)

    return read


def _whole(low: int, high: int = MAX_COUNT) -> Read:
    def read(name: str, value: Any, _depth: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ValueError(f"{name} must be a whole number from {low} to {high} (got {value!r})")
        return value

    return read


def _event(_name: str, value: Any, depth: int) -> DpEvent:
    return _read_event(value, depth + 1)


def _events(name: str, value: Any, depth: int) -> list[DpEvent]:
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_TERMS:
        raise ValueError(f"{name} must be a list of 1 to {MAX_TERMS} events")
    return [_read_event(item, depth + 1) for item in value]


def _reals(low: float, high: float = math.inf) -> Read:
    number = _real(low, high, open_low=False)

    def read(name: str, value: Any, depth: int) -> tuple[float, ...]:
        if not isinstance(value, list) or not 1 <= len(value) <= MAX_TERMS:
            raise ValueError(f"{name} must be a list of 1 to {MAX_TERMS} numbers")
        return tuple(number(name, item, depth) for item in value)

    return read


def _shape(name: str, value: Any, depth: int) -> float:
    return math.inf if value == INFINITY else cast(float, _real(0.0, open_low=False)(name, value, depth))


_POSITIVE, _RATE = _real(0.0), _real(0.0, 1.0)


@dataclass(frozen=True)
class _Kind:
    event: type
    fields: Mapping[str, Read]


KINDS: Mapping[str, _Kind] = {
    "no-op": _Kind(dp_event.NoOpDpEvent, {}),
    "non-private": _Kind(dp_event.NonPrivateDpEvent, {}),
    "gaussian": _Kind(dp_event.GaussianDpEvent, {"noise_multiplier": _POSITIVE}),
    "laplace": _Kind(dp_event.LaplaceDpEvent, {"noise_multiplier": _POSITIVE}),
    "poisson-sampled": _Kind(dp_event.PoissonSampledDpEvent, {"sampling_probability": _RATE, "event": _event}),
    "sampled-without-replacement": _Kind(
        dp_event.SampledWithoutReplacementDpEvent,
        {"source_dataset_size": _whole(1), "sample_size": _whole(1), "event": _event},
    ),
    "self-composed": _Kind(dp_event.SelfComposedDpEvent, {"event": _event, "count": _whole(1)}),
    "composed": _Kind(dp_event.ComposedDpEvent, {"events": _events}),
    "zcdp": _Kind(dp_event.ZCDpEvent, {"rho": _real(0.0, open_low=False), "xi": _real(0.0, open_low=False)}),
    "truncated-subsampled-gaussian": _Kind(
        dp_event.TruncatedSubsampledGaussianDpEvent,
        {
            "dataset_size": _whole(1),
            "sampling_probability": _RATE,
            "truncated_batch_size": _whole(1),
            "noise_multiplier": _POSITIVE,
        },
    ),
    "mixture-of-gaussians": _Kind(
        dp_event.MixtureOfGaussiansDpEvent,
        {"standard_deviation": _POSITIVE, "sensitivities": _reals(0.0), "sampling_probs": _reals(0.0, 1.0)},
    ),
    "repeat-and-select": _Kind(
        dp_event.RepeatAndSelectDpEvent, {"event": _event, "mean": _real(1.0, open_low=False), "shape": _shape}
    ),
}
_KIND_OF = {kind.event: name for name, kind in KINDS.items()}


def event_from_json(value: Mapping[str, Any]) -> DpEvent:
    """The event that a JSON object stands for. Raises ValueError on unknown kinds or keys and values out of range."""
    return _read_event(value, 0)


def _read_event(value: Any, depth: int) -> DpEvent:
    if depth > MAX_DEPTH:
        raise ValueError(f"privacy event nested deeper than {MAX_DEPTH}")
    if not isinstance(value, Mapping):
        raise ValueError(f"privacy event must be an object (got {type(value).__name__})")
    kind = KINDS.get(value["kind"]) if isinstance(value.get("kind"), str) else None
    if kind is None:
        raise ValueError(f"unknown privacy event kind {value.get('kind')!r}. Valid: {', '.join(KINDS)}")
    if value.keys() != {"kind", *kind.fields}:
        raise ValueError(
            f"'{value['kind']}' takes exactly {sorted(kind.fields)} (got {sorted(value.keys() - {'kind'})})"
        )
    event = kind.event(**{name: read(name, value[name], depth) for name, read in kind.fields.items()})
    _check_whole_event(event)
    return event


def _check_whole_event(event: DpEvent) -> None:
    """What no single field can tell."""
    if isinstance(event, dp_event.SampledWithoutReplacementDpEvent) and event.sample_size > event.source_dataset_size:
        raise ValueError(f"sample_size {event.sample_size} exceeds source_dataset_size {event.source_dataset_size}")
    if isinstance(event, dp_event.MixtureOfGaussiansDpEvent):
        if len(event.sensitivities) != len(event.sampling_probs):
            raise ValueError("sensitivities and sampling_probs must be equally long")
        if abs(math.fsum(event.sampling_probs) - 1) > 1e-9:
            raise ValueError(f"sampling_probs must sum to 1 (got {math.fsum(event.sampling_probs)!r})")


def event_to_json(event: DpEvent) -> dict[str, Any]:
    """The JSON form of an event. Raises ValueError for what `event_from_json` would not take back."""
    value = _write_event(event)
    event_from_json(value)
    return value


def _write_event(event: DpEvent) -> dict[str, Any]:
    name = _KIND_OF.get(type(event))
    if name is None:
        raise ValueError(f"no JSON form for privacy event {type(event).__name__}")
    return {"kind": name, **{field: _write_value(getattr(event, field)) for field in KINDS[name].fields}}


def _write_value(value: Any) -> Any:
    if isinstance(value, DpEvent):
        return _write_event(value)
    if isinstance(value, list | tuple):
        return [_write_value(item) for item in value]
    return INFINITY if isinstance(value, float) and value == math.inf else value


def event_key(event: DpEvent) -> str:
    """The canonical text of an event: a key for caches, and what the ledger hashes."""
    return canonical.dumps(event_to_json(event))


def _checked(event: DpEvent) -> DpEvent:
    """The same event after its own JSON: ranges checked, whole numbers given for reals made floats."""
    return event_from_json(_write_event(event))


def gaussian(noise_multiplier: float, count: int = 1) -> DpEvent:
    """`count` releases of sums with Gaussian noise; every record may be in each of them."""
    return _checked(dp_event.SelfComposedDpEvent(dp_event.GaussianDpEvent(noise_multiplier), count))


def dp_sgd(sample_rate: float, noise_multiplier: float, steps: int) -> DpEvent:
    """`steps` noised sums over batches that took each record independently with probability `sample_rate`."""
    step = dp_event.PoissonSampledDpEvent(sample_rate, dp_event.GaussianDpEvent(noise_multiplier))
    return _checked(dp_event.SelfComposedDpEvent(step, steps))


def truncated_dp_sgd(
    dataset_size: int, sample_rate: float, max_batch: int, noise_multiplier: float, steps: int
) -> DpEvent:
    """DP-SGD whose Poisson batches are cut to a uniformly chosen subset of `max_batch` (arXiv:2508.15089; zero-out)."""
    step = dp_event.TruncatedSubsampledGaussianDpEvent(dataset_size, sample_rate, max_batch, noise_multiplier)
    return _checked(dp_event.SelfComposedDpEvent(step, steps))


def fixed_cohort(population: int, size: int, noise_multiplier: float, rounds: int) -> DpEvent:
    """`rounds` noised sums over `size` of `population` clients, drawn without replacement (replace-one only)."""
    release = dp_event.SampledWithoutReplacementDpEvent(population, size, dp_event.GaussianDpEvent(noise_multiplier))
    return _checked(dp_event.SelfComposedDpEvent(release, rounds))


def user_level(sample_rate: float, noise_multiplier: float, steps: int, records: int) -> DpEvent:
    """DP-SGD as it looks to a person with up to `records` records, each sampled on its own.

    The number of a person's records in a batch is Binomial(records, q), and their sum is at most that many clip
    norms long: a mixture of Gaussians (Ganesh 2024, arXiv:2401.10294).
    """
    _whole(1, MAX_TERMS - 1)("records", records, 0)
    _RATE("sample_rate", sample_rate, 0)
    present = stats.binom.pmf(range(records + 1), records, sample_rate)
    probabilities = tuple((present / present.sum()).tolist())
    step = dp_event.MixtureOfGaussiansDpEvent(
        noise_multiplier, tuple(float(k) for k in range(records + 1)), probabilities
    )
    return _checked(dp_event.SelfComposedDpEvent(step, steps))


def adaptive_clip_noise(noise_multiplier: float, count_noise: float) -> float:
    """The update's own multiplier when the clip norm follows a noised count of clipped updates.

    Andrew et al. 2021, Theorem 1: a count in {−½, ½} per client with noise of standard deviation `count_noise` (σ_b)
    and an update with multiplier z_Δ = (z⁻² − (2σ_b)⁻²)^(−½) cost together what one Gaussian of multiplier
    z = `noise_multiplier` costs; account the pair as z.
    """
    _POSITIVE("noise_multiplier", noise_multiplier, 0)
    _POSITIVE("count_noise", count_noise, 0)
    left = noise_multiplier**-2 - (2 * count_noise) ** -2
    if left <= 0:
        raise ValueError(
            f"count_noise {count_noise:g} alone costs more than noise multiplier {noise_multiplier:g} allows: "
            f"it must be above {noise_multiplier / 2:g}. Raise it (a twentieth of the cohort is usual)."
        )
    return float(left**-0.5)
