"""ε of privacy events, by several accountants that must agree.

PLD (dp-accounting) is what a job fixed in advance claims; RDP (dp-accounting) and PRV (Opacus) are independent
witnesses. Known order: PLD ≤ RDP, and PRV is PLD plus 0.01 to 0.02 (PRIVACY.md 3.2). A figure out of order means
that one of them is wrong, and no ε is given: `AccountantsDisagree`. Which accountant takes which event under which
relation is a table (`SUPPORT`); an event with one witness only is labelled so, an event with none is refused. There is
no GDP/CLT accountant: its ε is an estimate that was 12 times too small on published cases.

Across jobs chosen one after the other these figures do not compose; `privacy.renyi_filter` is for that.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dp_accounting.dp_event import ComposedDpEvent, DpEvent

from fedplat.errors import JobError, UsageError, unknown_name
from privacy.accountants.pld import interval_for, pld_epsilon, taken_leaves
from privacy.accountants.prv import prv_epsilon
from privacy.accountants.rdp import NotTaken, rdp_curve, rdp_epsilon
from privacy.accountants.running import RunningEpsilon
from privacy.accountants.support import (
    ACCOUNTANTS,
    RELATIONS,
    SUPPORT,
    Accountant,
    Relation,
    kind_of,
    leaves_of,
    support_table,
    supports,
)
from privacy.events import user_level

__all__ = [
    "ACCOUNTANTS",
    "RELATIONS",
    "SUPPORT",
    "Accountant",
    "AccountantsDisagree",
    "Epsilons",
    "NotTaken",
    "Relation",
    "RunningEpsilon",
    "added_up",
    "composed_epsilon",
    "epsilon",
    "epsilons",
    "group_epsilon",
    "rdp_curve",
    "support_table",
]

PRV_TOLERANCE = 0.02
"""Opacus' PRV returns its upper end: 0.0095 to 0.0187 above PLD in all cases of PRIVACY.md."""
RDP_TOLERANCE = 0.005
_EPSILON_BY = {"pld": pld_epsilon, "rdp": rdp_epsilon, "prv": prv_epsilon}


class AccountantsDisagree(JobError):
    """Two accountants gave figures that can't both be right."""


@dataclass(frozen=True)
class Epsilons:
    """ε of one event at one δ, by each accountant that takes it, and which of them is the claim."""

    pld: float | None
    rdp: float | None
    prv: float | None
    claimed: float
    claimed_by: Accountant
    witnesses: int
    """How many accountants gave a figure; 1 means that nothing vouches for it but its own proof and code."""
    relation: Relation
    delta: float
    notes: tuple[str, ...] = ()
    """Why an accountant gave none."""


def epsilons(
    event: DpEvent, delta: float, relation: Relation = "add-remove", accountant: Accountant = "pld"
) -> Epsilons:
    """ε by every accountant that takes the event. `accountant` claims; where PLD gives no figure, RDP does."""
    check_delta(delta)
    check_accountant(accountant)
    check_taken(event, relation)
    found: dict[Accountant, float | None] = {}
    notes: list[str] = []
    for name in ACCOUNTANTS:
        try:
            found[name] = _EPSILON_BY[name](event, delta, relation)
        except NotTaken as reason:
            found[name] = None
            notes.append(str(reason))
    _check_agreement(event, found, delta, relation)
    claimed_by = accountant
    if found[claimed_by] is None and accountant == "pld" and found["rdp"] is not None:
        claimed_by = "rdp"
    claimed = found[claimed_by]
    if claimed is None:
        raise UsageError(f"no ε by {claimed_by}: {'; '.join(notes)}. Ask for another accountant, or use more noise.")
    witnesses = sum(value is not None for value in found.values())
    figures = (found["pld"], found["rdp"], found["prv"])
    return Epsilons(*figures, claimed, claimed_by, witnesses, relation, delta, tuple(notes))


def epsilon(event: DpEvent, delta: float, relation: Relation = "add-remove", accountant: Accountant = "pld") -> float:
    """The claim alone, without witnesses: for searches and tables. What is reported goes through `epsilons`."""
    check_delta(delta)
    check_accountant(accountant)
    check_taken(event, relation)
    try:
        return _EPSILON_BY[accountant](event, delta, relation)
    except NotTaken as reason:
        if accountant != "pld":
            raise UsageError(f"no ε by {accountant}: {reason}. Ask for another accountant.") from reason
    return epsilon(event, delta, relation, "rdp")


def check_delta(delta: float) -> None:
    if not 0 < delta < 1:
        raise UsageError(f"δ must be between 0 and 1 (got {delta:g}). Usual: well below 1 / number of records.")


def check_accountant(accountant: str) -> None:
    if accountant not in ACCOUNTANTS:
        raise UsageError(unknown_name("accountant", accountant, ACCOUNTANTS))


def check_taken(event: DpEvent, relation: Relation) -> None:
    """Refuse what no accountant can take as a whole."""
    if relation not in RELATIONS:
        raise UsageError(f"unknown neighbouring relation '{relation}'. Valid: {', '.join(RELATIONS)}")
    leaves = leaves_of(event)
    if not any(all(supports(name, leaf, relation) for leaf in leaves) for name in ACCOUNTANTS):
        kinds = sorted({str(kind_of(leaf) or type(leaf).__name__) for leaf in leaves})
        raise UsageError(f"no accountant takes {' with '.join(kinds)} under {relation}. See the support table.")


def _check_agreement(event: DpEvent, found: dict[Accountant, float | None], delta: float, relation: Relation) -> None:
    pld, rdp, prv = found["pld"], found["rdp"], found["prv"]
    if pld is None or math.isinf(pld):
        return
    slack = _discretisation_slack(event, delta, relation)
    if rdp is not None and pld > rdp + RDP_TOLERANCE + slack:
        raise AccountantsDisagree(
            f"PLD says ε = {pld:.5g} but RDP, a looser bound, {rdp:.5g}. Don't use either; report it as a bug."
        )
    if prv is not None and (prv - pld > PRV_TOLERANCE or pld - prv > PRV_TOLERANCE + slack):
        raise AccountantsDisagree(
            f"PLD says ε = {pld:.5g} and PRV {prv:.5g}; they may differ by {PRV_TOLERANCE:g}. "
            "Don't use either; report it as a bug."
        )


def _discretisation_slack(event: DpEvent, delta: float, relation: Relation) -> float:
    """How far PLD's pessimistic grid may lie above the truth: 2·n·h², as measured (`privacy.accountants.pld`)."""
    leaves = taken_leaves(event, relation)
    if not leaves:
        return 0.0
    return 2 * sum(leaves.values()) * interval_for(leaves, delta, relation) ** 2


def composed_epsilon(
    parts: Sequence[DpEvent], delta: float, relation: Relation = "add-remove", accountant: Accountant = "pld"
) -> float:
    """ε of somebody who is in all of several datasets, each with its own releases, at one δ for all together.

    Sequential composition: what the parts release about one person is one long release, whoever made them, if all are
    accounted under one relation. Tighter than adding up ε and δ (`added_up`), and for schedules fixed in advance only.
    """
    return epsilon(ComposedDpEvent(list(parts)), delta, relation, accountant) if parts else 0.0


def added_up(claims: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(ε, δ) of somebody who is in all datasets of these claims: ε and δ add up (basic composition).

    Holds for any claims under one relation, by any accountant or filter, also for jobs that are chosen after seeing
    results from the other datasets: at several sites nobody sees more than these numbers.
    """
    return math.fsum(epsilon for epsilon, _ in claims), math.fsum(delta for _, delta in claims)


def group_epsilon(sample_rate: float, noise_multiplier: float, steps: int, records: int, delta: float) -> float:
    """ε of DP-SGD for a person with up to `records` records (add-remove of all of them), by PLD of the mixture.

    Tighter than k·ε with δ blown up: the records are sampled independently, so k of them rarely meet in a batch.
    """
    return epsilon(user_level(sample_rate, noise_multiplier, steps, records), delta)
