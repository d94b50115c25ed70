"""`fedplat site`: what a site's administrator runs."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    help="Be a site: make its keys, run its agent.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)


@app.callback()
def site() -> None:
    """Be a site: make its keys, run its agent."""


@app.command()
def keygen(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the site in the consortium.")],
    out: Annotated[Path | None, typer.Option("--out", help="Directory for the keys; default: ./NAME.")] = None,
    operator: Annotated[bool, typer.Option("--operator", help="Keys of an operator, who has no SuperNode.")] = False,
) -> None:
    """Make a party's private keys where they are used, so that only their public halves travel.

    Examples:

    `fedplat site keygen north` — keys in ./north

    `fedplat site keygen north --out /etc/fedplat/north`

    `fedplat site keygen olga --operator`
    """
    from fedplat.consortium.keygen import keygen as make_keys
    from fedplat.consortium.keygen import require_name

    require_name(name)
    folder = out or Path(name)
    bundle = make_keys(name, folder, "operator" if operator else "site")
    section = "operators" if operator else "sites"
    typer.echo(f"wrote the private keys of '{name}' to {folder}: they stay there")
    typer.echo("next:")
    typer.echo(f"  send {bundle} to whoever runs `fedplat provision`, over a way on which nobody can swap it")
    typer.echo(f'  they name it in consortium.toml:  [[{section}]]  name = "{name}"  public = "{bundle.name}"')
    typer.echo(f"  put the kit that comes back into {folder}, beside the keys; then: fedplat doctor {folder}")
