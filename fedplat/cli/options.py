"""Options that several commands share, so that they read and behave the same everywhere."""

import logging
from pathlib import Path
from typing import Annotated

import typer

JobFile = Annotated[
    Path | None,
    typer.Argument(metavar="[JOB.TOML]", help="Job file; without one, the built-in digits job.", show_default=False),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override a key of the job; repeatable."),
]
Engine = Annotated[
    str | None,
    typer.Option("--engine", metavar="auto|vector|process|serial|ray", help="How virtual clients are computed."),
]
RunReference = Annotated[
    str, typer.Argument(metavar="RUN", help="Run: its directory, its id, a unique prefix, or 'latest'.")
]
RunReferences = Annotated[
    list[str], typer.Argument(metavar="RUN...", help="Runs: directories, ids, prefixes, or 'latest'.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line of stdout.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors (and --json).")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Log what happens, Flower's log included.")]


def set_up_logging(verbose: bool) -> None:
    """Warnings, or everything with --verbose; Flower's log follows (fedplat.flower)."""
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING, format="%(levelname)s %(name)s: %(message)s"
    )
