"""What is asked of the ledger, turned into entries: accounts opened, charges reserved, reservations committed.

Everything here happens inside one transaction that holds the write lock; whatever raises leaves the ledger as it was.
"""

import math
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from fedplat.errors import JobError, UsageError
from privacy.accountants.rdp import NotTaken
from privacy.ledger_account import (
    UNLIMITED_ORDER,
    Book,
    Budget,
    BudgetExceeded,
    Charge,
    Outcome,
    Refusal,
    Reservation,
    Tallies,
    Terms,
    add_up,
    refusal,
    tallied,
)
from privacy.ledger_chain import event_cost
from privacy.ledger_store import Transaction
from privacy.renyi_filter import FilterCharge, RenyiBudget, best_order

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}")
Cap = Mapping[str, int] | int | None
Costs = dict[tuple[str, float, str, float | None], FilterCharge]
"""Costs by event, order, relation and budget, within one transaction."""


def open_account(transaction: Transaction, terms: Terms) -> None:
    if not NAME.fullmatch(terms.account):
        raise UsageError(f"'{terms.account}' can't name an account: letters, digits and . _ / - only, at most 128")
    genesis, limits = declaration(terms)
    book = transaction.append(None, terms.account, "genesis", genesis)
    transaction.append(book, terms.account, "budget", limits)


def require_one_unit(transaction: Transaction, terms: Sequence[Terms]) -> None:
    """Refuse a dataset that has spent under another unit: what is released about all that a site holds is released
    about each of its examples, so a fresh account would be a second budget for the same data."""
    limited = [term for term in terms if term.budget is not None]
    if not limited:  # a simulation has an account per client, and no budget
        return
    names = transaction.names()
    transaction.load(names)
    spent = [book for book in map(transaction.book, names) if book.totals.releases]
    for term in limited:
        same = [book for book in spent if book.dataset == term.dataset and book.account != term.account]
        others = [book.unit for book in same if book.unit != term.unit]
        if others:
            raise UsageError(
                f"{term.account}: the dataset '{term.dataset}' has spent under the unit '{others[0]}', and its budget "
                f"is counted there. Put unit = '{others[0]}' back"
            )


def declaration(terms: Terms) -> tuple[dict[str, Any], dict[str, Any]]:
    """Bodies of an account's first two entries."""
    genesis = {"dataset": terms.dataset, "unit": terms.unit, "relation": terms.relation}
    if terms.budget is not None:
        return genesis, asdict(_checked(terms.account, terms.budget))
    if terms.delta is None or not 0 < terms.delta < 1:
        raise UsageError(f"{terms.account}: an account without a budget needs a delta between 0 and 1, for display")
    return genesis, {"epsilon": None, "delta": terms.delta, "order": UNLIMITED_ORDER, "period_days": None}


def _checked(account: str, budget: Budget) -> Budget:
    """The budget with its order declared. Raises if it leaves room for nothing."""
    if budget.period_days is not None and not budget.period_days > 0:
        raise UsageError(f"{account}: period_days must be > 0 (got {budget.period_days}). Leave it out for a lifetime")
    order = best_order(budget.epsilon, budget.delta) if budget.order is None else budget.order
    RenyiBudget(budget.epsilon, budget.delta, order)
    return replace(budget, order=float(order))


def adjust_account(transaction: Transaction, terms: Terms) -> None:
    """Bring an account in line: before its first release any limit may change, afterwards only ε."""
    book, budget = transaction.book(terms.account), terms.budget
    fixed: dict[str, tuple[object, object]] = {
        key: (getattr(book, key), getattr(terms, key)) for key in ("dataset", "unit", "relation")
    }
    fixed["unlimited"] = (book.epsilon is None, budget is None)
    if budget is not None and book.totals.releases:
        order = book.order if budget.order is None else budget.order
        fixed["delta"], fixed["period_days"] = (book.delta, budget.delta), (book.period_days, budget.period_days)
        fixed["order"] = (book.order, order)
        budget = replace(budget, order=order)
    wrong = [f"{key} is {old} there, {new} here" for key, (old, new) in fixed.items() if old != new]
    if wrong:
        raise UsageError(
            f"{terms.account}: the ledger has this account on other terms ({'; '.join(wrong)}). Only epsilon may "
            "change: what was spent was counted on those terms. Put them back, or name a new dataset"
        )
    if budget is not None:
        limits = asdict(_checked(terms.account, budget))
        if limits != {key: getattr(book, key) for key in limits}:
            transaction.append(book, terms.account, "budget", limits)


def reserve(transaction: Transaction, charge: Charge, cap: Cap, costs: Costs) -> Reservation | Refusal:
    book, found = examine(transaction, charge, cap, costs)
    if not isinstance(found, dict):
        return found
    token = found["token"] = secrets.token_hex(16)
    transaction.append(book, charge.account, "reserve", found)
    return Reservation(token, transaction.head.seq, charge.account, found["event"])


def examine(
    transaction: Transaction, charge: Charge, cap: Cap, costs: Costs
) -> tuple[Book, dict[str, Any] | Reservation | Refusal]:
    """What `reserve` would do now: write this entry, find the job's reservation, or refuse."""
    book = transaction.book(charge.account).at(transaction.now)
    _check_charge(book, charge)
    digest, text = transaction.event(charge.event)
    if charge.purpose == "job":
        existing = whole_job(transaction, charge)
        if existing is not None:
            return book, existing
    key = (digest, book.order, book.relation, book.epsilon)
    if key not in costs:
        costs[key] = _cost(book, text)
    rdp, slack = costs[key].rdp, add_up(costs[key].slack, charge.delta_slack)
    earlier = transaction.job_tallies(book, charge.identity.job)
    error = _over_cap(book, charge, cap, earlier) or refusal(book, rdp, slack)
    if error is not None:
        return book, Refusal(charge.account, error)
    return book, {
        "identity": asdict(charge.identity),
        "purpose": charge.purpose,
        "event": digest,
        "rdp": rdp,
        "slack": slack,
        "delta_slack": charge.delta_slack,
        "insecure_noise": charge.insecure_noise,
        "note": charge.note,
        "earlier": earlier,
    }


def _check_charge(book: Book, charge: Charge) -> None:
    if charge.relation != book.relation:
        raise UsageError(
            f"{charge.account}: its budget is for the relation {book.relation}, the job is accounted under "
            f"{charge.relation}; the two don't add up. Account it under {book.relation}, or open another dataset"
        )
    if not charge.identity.job:
        raise UsageError(f"{charge.account}: a charge without a job can't be told from another")
    if not 0 <= charge.delta_slack < 1:
        raise UsageError(f"{charge.account}: delta_slack must be in [0, 1) (got {charge.delta_slack})")


def _cost(book: Book, event_json: str) -> FilterCharge:
    try:
        cost = event_cost(book, event_json)
    except NotTaken as reason:
        raise UsageError(f"{book.account}: a budget can't be charged for this event: {reason}") from None
    if not math.isfinite(cost.rdp):
        raise UsageError(f"{book.account}: this release is not private at all: no budget covers it. Add noise")
    return cost


def whole_job(transaction: Transaction, charge: Charge) -> Reservation | None:
    """The same job asks again, after a restart: what it reserved is still reserved. For another event it is refused."""
    digest, _ = transaction.event(charge.event)
    entry = transaction.job_reservation(charge.account, charge.identity.job)
    if entry is None:
        return None
    if (entry.body["event"], entry.body["delta_slack"]) != (digest, charge.delta_slack):
        raise UsageError(
            f"{charge.account}: job '{charge.identity.job}' has reserved another event before (entry {entry.seq}). "
            "Give the changed job a new identity: it is a new spend"
        )
    outcome = transaction.outcomes([entry.seq]).get(entry.seq)
    return Reservation(entry.body["token"], entry.seq, charge.account, digest, outcome)


def _over_cap(book: Book, charge: Charge, cap: Cap, earlier: Tallies) -> BudgetExceeded | None:
    most = cap.get(charge.account) if isinstance(cap, Mapping) else cap
    job, number = charge.identity.job, charge.identity.round
    before, after = earlier.get(charge.purpose), tallied(earlier, charge.purpose, number)[charge.purpose]
    done, repeats = (before["releases"], before["repeats"]) if before else (0, 0)
    if most is not None and done >= most:
        reason = (
            f"job '{job}' has had {done} releases ({charge.purpose}) of the {most} that its plan allows. "
            "Nothing was computed. Plan for more rounds in a new job"
        )
    elif charge.most_repeats is not None and after["repeats"] > max(repeats, charge.most_repeats):
        reason = (
            f"job '{job}' asks for round {number} after round {after['highest']}, and has had the "
            f"{charge.most_repeats} repeated rounds (privacy.spare_rounds) that its charge covers. Nothing was "
            "computed. To run it again, give it another job.name or job.seed: a new job, charged anew"
        )
    else:
        return None
    return BudgetExceeded(book.account, 0.0, 0.0, book.epsilon or 0.0, reason)


def commit(transaction: Transaction, reservations: Sequence[Reservation], outcome: Outcome) -> None:
    numbers = [reservation.seq for reservation in reservations]
    reserved, done = transaction.entries_by_seq(numbers), transaction.outcomes(numbers)
    transaction.load(reservation.account for reservation in reservations)
    for reservation in reservations:
        entry, account = reserved.get(reservation.seq), reservation.account
        if entry is None or (entry.account, entry.body.get("token")) != (account, reservation.token):
            raise JobError(f"{account}: entry {reservation.seq} of the ledger is not this reservation")
        book = transaction.book(account)
        if reservation.seq in done:
            if (done[reservation.seq], outcome) == ("failed", "released"):  # a whole job whose first round failed
                done[reservation.seq] = outcome
                text = f"entry {reservation.seq}, committed as failed, was released after all"
                transaction.append(book, account, "note", {"text": text})
            continue
        done[reservation.seq] = outcome
        window = entry.body["after"]["window"]
        body = {"reservation": entry.seq, "outcome": outcome, "rdp": entry.body["rdp"], "window": window}
        transaction.append(book, account, "commit", body)
