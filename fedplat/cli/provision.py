"""`fedplat provision`: one kit per party of a consortium, and every later change to it."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedplat.cli.options import Json
from fedplat.errors import UsageError

if TYPE_CHECKING:
    from fedplat.consortium.kits import Provisioned
    from fedplat.consortium.spec import ConsortiumSpec

SpecFile = Annotated[Path, typer.Argument(metavar="[CONSORTIUM.TOML]", help="Who takes part, and where the server is.")]
Out = Annotated[Path, typer.Option("--out", help="Directory of the kits; the authority's keys stay in it.")]
Revoke = Annotated[list[str] | None, typer.Option("--revoke", metavar="NAME", help="Shut a party out; repeatable.")]
Rotate = Annotated[
    list[str] | None,
    typer.Option("--rotate", metavar="NAME", help="New certificate and keys for a party, or 'server'; repeatable."),
]
Init = Annotated[bool, typer.Option("--init", help="Write a consortium.toml to start from.")]


def provision(
    spec_file: SpecFile = Path("consortium.toml"),
    out: Out = Path("kits"),
    revoke: Revoke = None,
    rotate: Rotate = None,
    init: Init = False,
    json_output: Json = False,
) -> None:
    """Make a kit for every party of a consortium: keys, certificates, the signed roster, configuration.

    Run it again after each edit of the file: new parties get kits, the others' keys stay as they are. A party that is
    deleted from the file takes part until it is revoked.

    Examples:

    `fedplat provision --init` — a consortium.toml to edit

    `fedplat provision consortium.toml`

    `fedplat provision --rotate site-2` — before its certificate expires; the old one is shut out at once

    `fedplat provision --revoke site-2`
    """
    if init:
        _write_template(spec_file)
        return
    from fedplat.consortium import kits
    from fedplat.consortium.spec import load_spec
    from privacy.site_budgets import TEMPLATE

    spec = load_spec(spec_file)
    done = kits.provision(spec, out, lambda name: TEMPLATE.format(name=name), rotate=rotate or [], revoke=revoke or [])
    if json_output:
        typer.echo(json.dumps(_as_json(done)))
    else:
        _show(done, spec)


def _write_template(path: Path) -> None:
    from fedplat.consortium.spec import TEMPLATE

    if path.exists():
        raise UsageError(f"{path} exists already; --init never overwrites it")
    path.write_text(TEMPLATE, encoding="utf-8")
    typer.echo(f"wrote {path}: edit it, then: fedplat provision {path}")


def _as_json(done: "Provisioned") -> dict[str, object]:
    return {
        "out": str(done.out),
        "roster_version": done.version,
        "issued": done.issued,
        "rotated": done.rotated,
        "revoked": done.revoked,
        "remarks": done.remarks,
    }


def _show(done: "Provisioned", spec: "ConsortiumSpec") -> None:
    for verb, names in (("issued", done.issued), ("rotated", done.rotated), ("revoked", done.revoked)):
        if names:
            typer.echo(f"{verb}: {', '.join(names)}")
    state = f"roster version {done.version}" if done.changed else f"nothing to change (roster version {done.version})"
    typer.echo(f"{done.out}: {state}")
    for remark in done.remarks:
        typer.echo(f"note: {remark}")
    if done.changed:
        typer.echo("next:")
        for step in _next_steps(done, spec):
            typer.echo(f"  {step}")


def _next_steps(done: "Provisioned", spec: "ConsortiumSpec") -> list[str]:
    fresh, steps = {*done.issued, *done.rotated}, []
    own_keys = {name for name, (_, party) in spec.parties().items() if party.public}
    if fresh & {site.name for site in spec.sites}:
        steps.append(f"hand {done.out}/sites/NAME to each new site over a safe way; there: fedplat doctor NAME")
    if fresh & {operator.name for operator in spec.operators}:
        steps.append(f"hand {done.out}/operators/NAME to each new operator")
    if fresh & own_keys:
        steps.append("who made their own keys copies them into the kit; they never were here")
    if "server" in fresh:
        steps.append(f"put {done.out}/server on the server; there: fedplat doctor server && server/start.sh")
    elif done.changed:
        steps.append(
            f"copy {done.out}/server/access.json and roster.json to the server: the change counts from then on"
        )
    steps.append(f"copy roster.json to the sites whose kits are elsewhere; keep {done.out}/authority safe and offline")
    return steps
