"""`fedplat budget`: what each dataset of a site has spent on privacy, what is reserved and what is left."""

import json
import math
import os
import platform
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedplat.cli.options import Json
from fedplat.cli.person import person_bound
from fedplat.errors import UsageError

if TYPE_CHECKING:
    from rich.text import Text

    from privacy.ledger import Balance, Entry, Ledger
    from privacy.site_budgets import Site

BAR_WIDTH = 40
MOST_SPENT = 10
SiteFile = Annotated[
    Path | None, typer.Option("--site", help="The site's own file; default: $FEDPLAT_SITE, else ./site.toml.")
]
LedgerFile = Annotated[Path | None, typer.Option("--ledger", help="Any ledger, without its site's file.")]
RunOption = Annotated[
    str | None, typer.Option("--run", metavar="RUN", help="The ledger of a simulated run: the ten that spent most.")
]
Init = Annotated[bool, typer.Option("--init", help="Write site.toml if there is none; make the ledger; open accounts.")]
History = Annotated[str | None, typer.Option("--history", metavar="ACCOUNT", help="Every entry of one account.")]
Verify = Annotated[bool, typer.Option("--verify", help="Read the whole ledger and recompute every hash and total.")]
Person = Annotated[
    list[str] | None,
    typer.Option("--person", metavar="DATASET", help="For somebody in all these datasets (give it once for each)."),
]
LARGE_DELTA = 1e-4


@dataclass(frozen=True)
class _Source:
    """Which ledger is meant."""

    ledger: Path
    site: "Site | None" = None
    run: bool = False


def budget(
    site_file: SiteFile = None,
    ledger_file: LedgerFile = None,
    run: RunOption = None,
    json_output: Json = False,
    init: Init = False,
    history: History = None,
    verify: Verify = False,
    person: Person = None,
) -> None:
    """Privacy spent, reserved and left for each dataset of this site.

    A reservation counts as spent, whatever became of it. ε is that of the filter that guards the account.

    Examples:

    `fedplat budget --init` — a site's file and its ledger

    `fedplat budget --site /etc/fedplat/site.toml --json`

    `fedplat budget --history digits/sample`

    `fedplat budget --verify` — exit code 1 if the ledger was tampered with

    `fedplat budget --person digits --person wards` — for somebody who is in both

    `fedplat budget --run latest` — what a simulation's clients would have spent
    """
    if sum(given is not None for given in (site_file, ledger_file, run)) > 1:
        raise UsageError("give one of --site, --ledger, --run")
    if init:
        if ledger_file or run:
            raise UsageError("--init makes the ledger that a site's file names: give --site, or nothing")
        _initialise(site_file, quiet=json_output)
    source = _source(site_file, ledger_file, run)
    with _open(source, verify) as ledger:
        if verify and not json_output:
            head = ledger.head()
            typer.echo(f"verified: {head.seq} entries, head {head.hash}")
        if history is not None:
            _show_history(ledger, history, json_output)
        elif person:
            bound = person_bound(ledger, person, _balances(source, ledger))
            typer.echo(json.dumps({"person": bound.as_json()}) if json_output else bound.in_words())
        elif json_output:
            typer.echo(json.dumps(_as_json(ledger, _balances(source, ledger))))
        else:
            _show_balances(source, ledger, _balances(source, ledger))


def _site_path(given: Path | None) -> Path:
    from privacy.site_budgets import ENVIRONMENT

    return given or Path(os.environ.get(ENVIRONMENT) or "site.toml")


def _source(site_file: Path | None, ledger_file: Path | None, run: str | None) -> _Source:
    if ledger_file is not None:
        return _Source(ledger_file)
    if run is not None:
        from fedplat.rundir import find_run

        found = find_run(run)
        ledger = found.path / "ledger.sqlite"
        if not ledger.exists():
            raise UsageError(f"{found.path}: this run has no ledger: it was not private. Add [privacy] to its job")
        return _Source(ledger, run=True)
    from privacy.site_budgets import load_site

    site = load_site(_site_path(site_file))
    return _Source(site.ledger, site)


def _open(source: _Source, verify: bool) -> "Ledger":
    from privacy.ledger import Ledger

    site = source.site
    name, counter = (site.name, site.counter) if site else (None, None)
    return Ledger.open(source.ledger, name, counter=counter, readonly=True, verify=verify)


def _initialise(site_file: Path | None, quiet: bool) -> None:
    from privacy.site_budgets import TEMPLATE, create_site_ledger, load_site, open_site_ledger

    path, steps = _site_path(site_file), []
    written = not path.exists()
    if written:
        name = re.sub(r"[^A-Za-z0-9._-]", "-", platform.node())[:64].lstrip("._-") or "my-site"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(TEMPLATE.format(name=name), encoding="utf-8")
        steps.append(f"wrote {path}: edit it, then open its accounts with: fedplat budget --init --site {path}")
    site = load_site(path)
    if not site.ledger.exists():
        create_site_ledger(site)
        steps.append(f"made {site.ledger}, the ledger of site '{site.name}'")
    if not written:
        open_site_ledger(site).close()
        steps.append(f"accounts are as {path} says")
    if not quiet:
        typer.echo("\n".join(steps))


def _balances(source: _Source, ledger: "Ledger") -> list["Balance"]:
    from privacy.site_budgets import site_balances

    if source.site is not None:
        return site_balances(source.site, ledger)
    return ledger.balances(MOST_SPENT if source.run else None)


def _as_json(ledger: "Ledger", balances: list["Balance"]) -> dict[str, Any]:
    head = ledger.head()
    return {
        "site": ledger.site,
        "ledger": str(ledger.path),
        "head": {"seq": head.seq, "hash": head.hash},
        "accounts": [_row(balance) for balance in balances],
    }


def _row(balance: "Balance") -> dict[str, Any]:
    renamed = {"spent_epsilon": "spent", "reserved_epsilon": "reserved", "left_epsilon": "left"}
    return {renamed.get(key, key): value for key, value in vars(balance).items()}


def _show_balances(source: _Source, ledger: "Ledger", balances: list["Balance"]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console.print(f"[bold]{ledger.path}[/]  site {ledger.site}", highlight=False)
    if not balances:
        console.print("no accounts yet", highlight=False)
        return
    limited = any(balance.epsilon is not None for balance in balances)
    extra = ("budget", "reserved", "left") if limited else ()
    table = Table(box=None, padding=(0, 1, 0, 0))
    for column in ("account", "relation", "ε spent", *extra, "δ", "releases", "period"):
        table.add_column(column, overflow="fold")
    for b in balances:
        limits = [_number(value) for value in (b.epsilon, b.reserved_epsilon, b.left_epsilon)] if limited else []
        numbers = [_number(b.spent_epsilon), *limits, f"{b.delta:g}", _releases(b), _period(b)]
        table.add_row(b.account, b.relation, *numbers)
    console.print(table)
    for b in balances:
        if b.epsilon is not None:
            console.print(_bar(b.account, b.spent_epsilon / b.epsilon), highlight=False)
    for line in _remarks(source, balances):
        console.print(line, highlight=False)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _releases(balance: "Balance") -> str:
    insecure = f" ({balance.insecure_releases} with insecure noise)" if balance.insecure_releases else ""
    return f"{balance.releases}{insecure}"


def _period(balance: "Balance") -> str:
    if balance.period_ends is None:
        return "lifetime"
    return f"{balance.period_days:g} days, until {time.strftime('%Y-%m-%d', time.gmtime(balance.period_ends))}"


def _bar(account: str, share: float) -> "Text":
    from rich.text import Text

    spent = min(BAR_WIDTH, math.ceil(share * BAR_WIDTH))  # rounded up: what is left must not look like more
    colour = "red" if share > 0.9 else "yellow" if share > 0.6 else "green"
    return Text.assemble(("█" * spent, colour), ("░" * (BAR_WIDTH - spent), "dim"), f" {share:.0%} of {account}")


def _remarks(source: _Source, balances: list["Balance"]) -> list[str]:
    if source.run:
        return [
            f"the {MOST_SPENT} that spent most; a simulation has no budget, and its ε is that of the PLD accountant"
        ]
    if source.site is None:
        return []
    large = [
        f"{source.site.path}: datasets.{name}.delta = {data.delta:g} protects nobody among {1 / data.delta:.0f} "
        "examples or more: a mechanism that publishes one of them at random would pass"
        for name, data in source.site.datasets.items()
        if data.delta >= LARGE_DELTA
    ]
    declared = {terms.account: terms.budget.epsilon for terms in source.site.terms() if terms.budget}
    return large + [
        f"{source.site.path} says ε = {declared[b.account]:g} for {b.account}: it counts from the next job, or now "
        f"with: fedplat budget --init --site {source.site.path}"
        for b in balances
        if declared.get(b.account, b.epsilon) != b.epsilon
    ]


def _show_history(ledger: "Ledger", account: str, json_output: bool) -> None:
    entries = ledger.history(account)
    if json_output:
        rows = [{"seq": e.seq, "number": e.number, "kind": e.kind, "time": e.time, **_public(e)} for e in entries]
        typer.echo(json.dumps({"account": account, "entries": rows}))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("number", "time (UTC)", "kind", "what", "RDP", "RDP in all"):
        table.add_column(column, overflow="fold")
    for e in entries:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(e.time))
        rdp = f"{e.body['rdp']:.4g}" if e.kind == "reserve" else ""
        table.add_row(str(e.number), when, e.kind, _what(e), rdp, f"{e.body['after']['rdp']:.4g}")
    Console().print(table)


def _public(entry: "Entry") -> dict[str, Any]:
    """An entry's body without its token: who shows a history must not hand out reservations."""
    return {key: value for key, value in entry.body.items() if key != "token"} | {"hash": entry.hash.hex()}


def _what(entry: "Entry") -> str:
    body = entry.body
    match entry.kind:
        case "genesis":
            return f"{body['dataset']}, unit {body['unit']}, {body['relation']}"
        case "budget":
            limit = "unlimited" if body["epsilon"] is None else f"ε = {body['epsilon']:g}"
            return f"{limit}, δ = {body['delta']:g}, order {body['order']:g}"
        case "reserve":
            who = body["identity"]
            insecure = ", INSECURE NOISE" if body["insecure_noise"] else ""
            return f"{body['purpose']}: job {who['job']}, round {who['round']}, attempt {who['attempt']}{insecure}"
        case "commit":
            return f"{body['outcome']} (entry {body['reservation']} of the ledger)"
    return str(body.get("text", ""))
