"""Who takes which event under which relation, and the one place where relations become sensitivities.

Three neighbouring relations, never mixed: *add-remove* (one record more or less), *zero-out* (a record's contribution
becomes zero; the number of records is public), *replace-one* (a record becomes another, so a sum moves by up to 2C).

Libraries disagree about the last one. dp-accounting's PLD under REPLACE_ONE doubles the sensitivity itself; its RDP
does not, and neither knows Opacus' PRV about relations at all. `normalise` settles it: events carry multipliers
relative to C, and an accountant that does not double gets half the multiplier.

Zero-out shares the figures of add-remove where the worst pair of output distributions is the same one: Gaussian,
Laplace, both under Poisson sampling, and mixtures of Gaussians (the record's share of the sum is there or is not).
"""

from collections.abc import Mapping
from typing import Literal, get_args

from dp_accounting import NeighboringRelation, dp_event
from dp_accounting.dp_event import DpEvent

Relation = Literal["add-remove", "zero-out", "replace-one"]
Accountant = Literal["pld", "rdp", "prv"]
Kind = Literal[
    "Gaussian",
    "Laplace",
    "Poisson-sampled Gaussian",
    "Poisson-sampled Laplace",
    "Gaussian on a fixed-size sample",
    "zCDP",
    "truncated Poisson-sampled Gaussian",
    "mixture of Gaussians",
    "repeat and select",
    "non-private",
]
RELATIONS: tuple[Relation, ...] = get_args(Relation)
ACCOUNTANTS: tuple[Accountant, ...] = get_args(Accountant)

_ALL = RELATIONS
_BOTH: tuple[Relation, ...] = ("add-remove", "zero-out")
_NONE: tuple[Relation, ...] = ()

SUPPORT: Mapping[Kind, Mapping[Accountant, tuple[Relation, ...]]] = {
    "Gaussian": {"pld": _ALL, "rdp": _ALL, "prv": _ALL},
    "Laplace": {"pld": _BOTH, "rdp": _ALL, "prv": _NONE},
    "Poisson-sampled Gaussian": {"pld": _ALL, "rdp": _BOTH, "prv": _BOTH},
    "Poisson-sampled Laplace": {"pld": _BOTH, "rdp": _NONE, "prv": _NONE},
    "Gaussian on a fixed-size sample": {"pld": _NONE, "rdp": ("replace-one",), "prv": _NONE},
    "zCDP": {"pld": _NONE, "rdp": _ALL, "prv": _NONE},
    "truncated Poisson-sampled Gaussian": {"pld": ("zero-out",), "rdp": _NONE, "prv": _NONE},
    "mixture of Gaussians": {"pld": _BOTH, "rdp": _NONE, "prv": _NONE},
    "repeat and select": {"pld": _NONE, "rdp": _ALL, "prv": _NONE},
    "non-private": {"pld": _ALL, "rdp": _ALL, "prv": _ALL},
}
"""Event × accountant → relations. Two notes: ρ of zCDP is stated by its mechanism for the declared relation; repeat and
select is taken under the relations under which RDP takes what is repeated."""

LIBRARY_RELATION: Mapping[Relation, NeighboringRelation] = {
    "add-remove": NeighboringRelation.ADD_OR_REMOVE_ONE,
    "zero-out": NeighboringRelation.REPLACE_SPECIAL,
    "replace-one": NeighboringRelation.REPLACE_ONE,
}
_PLAIN: Mapping[type, Kind] = {
    dp_event.GaussianDpEvent: "Gaussian",
    dp_event.LaplaceDpEvent: "Laplace",
    dp_event.ZCDpEvent: "zCDP",
    dp_event.TruncatedSubsampledGaussianDpEvent: "truncated Poisson-sampled Gaussian",
    dp_event.MixtureOfGaussiansDpEvent: "mixture of Gaussians",
    dp_event.RepeatAndSelectDpEvent: "repeat and select",
    dp_event.NonPrivateDpEvent: "non-private",
}

Leaves = dict[DpEvent, int]
"""Single releases and how often each happened. What accountants see: no composition, no no-op, Gaussians merged."""


def leaves_of(event: DpEvent) -> Leaves:
    """Flatten compositions. Unsampled Gaussians become one, exactly: 1/σ² adds up."""
    found: Leaves = {}
    _collect(event, 1, found)
    gaussians = {leaf: count for leaf, count in found.items() if isinstance(leaf, dp_event.GaussianDpEvent)}
    if sum(gaussians.values()) > 1:
        found = {leaf: count for leaf, count in found.items() if leaf not in gaussians}
        found[dp_event.GaussianDpEvent(_merged_noise(gaussians))] = 1
    return found


def _collect(event: DpEvent, count: int, found: Leaves) -> None:
    match event:
        case dp_event.NoOpDpEvent():
            pass
        case dp_event.SelfComposedDpEvent():
            _collect(event.event, count * event.count, found)
        case dp_event.ComposedDpEvent():
            for part in event.events:
                _collect(part, count, found)
        case _:
            leaf = _as_leaf(event)
            found[leaf] = found.get(leaf, 0) + count


def _as_leaf(event: DpEvent) -> DpEvent:
    """Several Gaussian releases from one sample are one (McMahan et al. 2018, arXiv:1812.06210, section 3)."""
    if isinstance(event, dp_event.PoissonSampledDpEvent | dp_event.SampledWithoutReplacementDpEvent):
        inner = leaves_of(event.event)
        if len(inner) == 1 and set(inner.values()) == {1}:
            (only,) = inner
            if isinstance(event, dp_event.PoissonSampledDpEvent):
                return only if event.sampling_probability == 1 else _poisson(event.sampling_probability, only)
            sizes = (event.source_dataset_size, event.sample_size)
            return dp_event.SampledWithoutReplacementDpEvent(*sizes, only)
    if isinstance(event, dp_event.MixtureOfGaussiansDpEvent):
        pairs = (tuple(event.sensitivities), tuple(event.sampling_probs))  # tuples: a leaf must be hashable
        return dp_event.MixtureOfGaussiansDpEvent(event.standard_deviation, *pairs)
    if isinstance(event, dp_event.RepeatAndSelectDpEvent):
        repeated = [dp_event.SelfComposedDpEvent(leaf, count) for leaf, count in leaves_of(event.event).items()]
        return dp_event.RepeatAndSelectDpEvent(dp_event.ComposedDpEvent(tuple(repeated)), event.mean, event.shape)
    return event


def _poisson(rate: float, leaf: DpEvent) -> DpEvent:
    return dp_event.PoissonSampledDpEvent(rate, leaf)


def _merged_noise(gaussians: Leaves) -> float:
    return float(sum(count / leaf.noise_multiplier**2 for leaf, count in gaussians.items()) ** -0.5)


def kind_of(leaf: DpEvent) -> Kind | None:
    """The row of the table that a leaf belongs to; None if it has none."""
    if isinstance(leaf, dp_event.PoissonSampledDpEvent):
        sampled: Mapping[type, Kind] = {
            dp_event.GaussianDpEvent: "Poisson-sampled Gaussian",
            dp_event.LaplaceDpEvent: "Poisson-sampled Laplace",
        }
        return sampled.get(type(leaf.event))
    if isinstance(leaf, dp_event.SampledWithoutReplacementDpEvent):
        return "Gaussian on a fixed-size sample" if isinstance(leaf.event, dp_event.GaussianDpEvent) else None
    return _PLAIN.get(type(leaf))


def supports(accountant: Accountant, leaf: DpEvent, relation: Relation) -> bool:
    kind = kind_of(leaf)
    if kind is None or relation not in SUPPORT[kind][accountant]:
        return False
    if isinstance(leaf, dp_event.RepeatAndSelectDpEvent):
        return all(supports(accountant, inner, relation) for inner in leaves_of(leaf.event))
    return True


def normalise(leaf: DpEvent, relation: Relation, accountant: Accountant) -> DpEvent:
    """The leaf as this accountant must see it, so that its figure is about `relation`.

    Under replace-one a sum moves by 2C, so noise σC is σ/2 times the sensitivity. PLD's REPLACE_ONE does that
    inside; RDP and PRV get the halved multiplier. (Gaussian(1), δ = 1e-5: all say 9.997 or, for RDP, 10.7; RDP
    unhalved would say 4.73, the figure of add-remove.)
    """
    if relation != "replace-one" or accountant == "pld":
        return leaf
    match leaf:
        case dp_event.GaussianDpEvent() | dp_event.LaplaceDpEvent():
            return type(leaf)(leaf.noise_multiplier / 2)
        case dp_event.SampledWithoutReplacementDpEvent():
            halved = normalise(leaf.event, relation, accountant)
            return dp_event.SampledWithoutReplacementDpEvent(leaf.source_dataset_size, leaf.sample_size, halved)
        case dp_event.RepeatAndSelectDpEvent():
            inner = [
                dp_event.SelfComposedDpEvent(normalise(part, relation, accountant), count)
                for part, count in leaves_of(leaf.event).items()
            ]
            return dp_event.RepeatAndSelectDpEvent(dp_event.ComposedDpEvent(tuple(inner)), leaf.mean, leaf.shape)
        case _:
            return leaf


def support_table() -> str:
    """The table as markdown, with the number of independent witnesses per relation."""
    lines = ["| event | PLD | RDP | PRV | one witness only |", "|---|---|---|---|---|"]
    for kind, takers in SUPPORT.items():
        cells = [", ".join(takers[accountant]) or "–" for accountant in ACCOUNTANTS]
        counts = {relation: sum(relation in takers[a] for a in ACCOUNTANTS) for relation in RELATIONS}
        single = ", ".join(relation for relation, count in counts.items() if count == 1)
        lines.append(f"| {kind} | {' | '.join(cells)} | {single or '–'} |")
    return "\n".join(lines) + "\n"
