"""`fedplat doctor`: is this kit fit to run?"""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedplat.cli.options import Json

if TYPE_CHECKING:
    from fedplat.consortium.doctor import Finding
    from fedplat.consortium.kit_files import Kit

KitFolder = Annotated[Path, typer.Argument(metavar="KIT", help="Directory of a site's, operator's or server's kit.")]
SameUser = Annotated[
    bool, typer.Option("--same-user", help="Only warn if the SuperNode runs as the agent's user (trying out).")
]
Offline = Annotated[bool, typer.Option("--offline", help="Don't connect to the server.")]
STYLES = {"ok": "green", "warning": "yellow", "fail": "bold red"}


def doctor(
    kit_folder: KitFolder = Path(),
    same_user: SameUser = False,
    offline: Offline = False,
    json_output: Json = False,
) -> None:
    """Check a kit: certificates, keys, permissions, roster, versions, the server and its clock, the SuperNode's user.

    One line per check: ok, warning or fail, and what to do. Exit code 1 if any failed.

    Examples:

    `fedplat doctor kits/sites/site-1`

    `fedplat doctor . --same-user --json`
    """
    from fedplat.consortium.doctor import examine
    from fedplat.consortium.kit_files import load_kit

    kit = load_kit(kit_folder)
    guarded, findings = _guarded(kit)
    findings += examine(kit, guarded, same_user=same_user, offline=offline)
    failed = any(finding.level == "fail" for finding in findings)
    if json_output:
        typer.echo(json.dumps({"kit": str(kit.folder), "ok": not failed, "findings": [vars(f) for f in findings]}))
    else:
        _show(findings)
    if failed:
        raise typer.Exit(1)


def _guarded(kit: "Kit") -> tuple[list[Path], list["Finding"]]:
    """What the SuperNode must not read beside the kit's keys: the ledger and the data that site.toml names."""
    from fedplat.consortium.doctor import Finding
    from fedplat.consortium.kit_files import SiteKit
    from fedplat.errors import UsageError
    from privacy.site_budgets import load_site

    if not isinstance(kit, SiteKit):
        return [], []
    try:
        site = load_site(kit.site_file)
    except UsageError as error:
        return [], [Finding("fail", "site.toml", str(error))]
    if site.name != kit.name:
        return [], [Finding("fail", "site.toml", f"{site.path} is the file of site '{site.name}', not of '{kit.name}'")]
    elsewhere = os.environ.get("FEDPLAT_DATA")
    data = [site.path.parent / dataset.dir for dataset in site.datasets.values() if dataset.dir]
    data += [Path(elsewhere)] if elsewhere and not all(dataset.dir for dataset in site.datasets.values()) else []
    ledger = [path for path in (site.ledger, site.counter) if path.exists()]
    findings = [Finding("ok", "site.toml", f"datasets: {', '.join(site.datasets) or 'none'}")]
    if not ledger:
        step = f"fedplat budget --init --site {site.path}"
        findings.append(Finding("warning", "ledger", f"{site.ledger} is not there yet. Edit site.toml, then: {step}"))
    return [*ledger, *data], findings


def _show(findings: list["Finding"]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        table.add_row(f"[{STYLES[finding.level]}]{finding.level}[/]", finding.what, _plain(finding.detail))
    Console(highlight=False).print(table)


def _plain(text: str) -> str:
    from rich.markup import escape

    return escape(text)
