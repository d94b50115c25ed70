"""Small real ledgers for the tests, in this process and in others."""

import json
import multiprocessing
import subprocess
import sys
from multiprocessing.context import ForkServerContext
from pathlib import Path

from privacy.events import gaussian
from privacy.ledger import Budget, Charge, Ledger, ReleaseIdentity

ACCOUNT = "digits/sample"
BUDGET = Budget(epsilon=8.0, delta=1e-6, order=6.0)


def charge(number: int = 0, *, noise: float = 5.0, job: str = "job", account: str = ACCOUNT, **fields) -> Charge:
    identity = ReleaseIdentity(job, number, 0, "client-0")
    return Charge(account, identity, gaussian(noise), **({"relation": "add-remove"} | fields))


def new_ledger(path: Path, budget: Budget | None = BUDGET, site: str = "hospital") -> Ledger:
    ledger = Ledger.create(path, site)
    ledger.open_account(
        ACCOUNT, dataset="digits", unit="sample", relation="add-remove", budget=budget, delta=None if budget else 1e-5
    )
    return ledger


def fill(ledger: Ledger, releases: int, first: int = 0) -> None:
    for number in range(first, first + releases):
        ledger.commit([ledger.reserve(charge(number))])


def processes() -> ForkServerContext:
    """Real processes that start fast: they are forked from one that has imported the ledger and opened nothing."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["privacy.ledger", __name__])
    return context


def python(code: str, *arguments: object, **options) -> subprocess.Popen:
    """A process of its own that runs this code; its arguments are in `args`."""
    prelude = "import json, sys; args = json.loads(sys.argv[1])\n"
    text = json.dumps([str(argument) for argument in arguments])
    return subprocess.Popen(
        [sys.executable, "-c", prelude + code, text],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
        **options,
    )
