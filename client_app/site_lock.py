"""One agent per ledger: two would pay for two releases with one reservation."""

from typing import TYPE_CHECKING

from fedplat.locks import hold

if TYPE_CHECKING:
    from privacy.site_budgets import Site


def lock_ledger(site: "Site") -> int:
    """Hold the site's ledger until this process ends. Two copies of a kit may name one ledger, so the lock is there."""
    ledger = site.ledger.resolve()
    return hold(ledger.with_name(f"{ledger.name}.agent"), f"another agent uses the ledger {ledger.name}")
