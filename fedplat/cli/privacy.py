"""`fedplat privacy`: what a training schedule costs in privacy, before anything is trained."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from fedplat.cli.options import Json
from fedplat.cli.terminal import console_for
from fedplat.errors import UsageError, unknown_name
from fedplat.privacy_section import LEAST_NOISE, MOST_NOISE

if TYPE_CHECKING:
    from dp_accounting.dp_event import DpEvent
    from rich.console import Console

    from privacy.accounting import Accountant, Epsilons, Relation, RunningEpsilon

app = typer.Typer(help="What a schedule costs in privacy.", no_args_is_help=True, rich_markup_mode="markdown")

NOISE_FACTORS = (0.5, 0.75, 1.0, 1.5, 2.0)
STEP_FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
CURVE_POINTS = 40
MOST_STEPS = 1_000_000_000

Curves = Mapping[float, Sequence[tuple[int, float]]]


@app.callback()
def privacy() -> None:
    """What a schedule costs in privacy."""


@dataclass(frozen=True)
class Schedule:
    """A DP-SGD schedule as asked for; `noise` None: to be solved."""

    sample_rate: float
    steps: int
    delta: float
    relation: "Relation"
    accountant: "Accountant"
    noise: float | None = None
    epsilon: float | None = None


@app.command()
def solve(
    sample_rate: Annotated[float, typer.Option("--sample-rate", metavar="Q", help="Chance of a record per step.")],
    steps: Annotated[int, typer.Option("--steps", metavar="T", help="Steps (per round, with --rounds).")],
    delta: Annotated[float, typer.Option("--delta", metavar="D", help="δ; well below 1 / number of records.")],
    noise: Annotated[float | None, typer.Option("--noise", metavar="Z", help="Noise multiplier: gives ε.")] = None,
    epsilon: Annotated[float | None, typer.Option("--epsilon", metavar="E", help="Target ε: gives the noise.")] = None,
    rounds: Annotated[int, typer.Option("--rounds", metavar="R", help="Rounds of so many steps.")] = 1,
    relation: Annotated[str, typer.Option("--relation", metavar="add-remove|zero-out|replace-one")] = "add-remove",
    accountant: Annotated[str, typer.Option("--accountant", metavar="pld|rdp|prv", help="Whose ε is claimed.")] = "pld",
    what_if: Annotated[bool, typer.Option("--what-if", help="Also ε for other noises and steps.")] = False,
    plot: Annotated[Path | None, typer.Option("--plot", metavar="FILE.png", help="Draw ε over steps.")] = None,
    json_output: Json = False,
) -> None:
    """ε of a DP-SGD schedule, or the least noise for an ε.

    Records must be drawn at random for each step (Poisson sampling), as fedplat's sampler does.

    ε of a schedule: `fedplat privacy solve --sample-rate 0.01 --noise 1.1 --steps 1000 --delta 1e-5`

    Noise for ε = 2 over 50 rounds of 20 steps:
    `fedplat privacy solve --sample-rate 0.01 --epsilon 2 --steps 20 --rounds 50 --delta 1e-5 --what-if`
    """
    schedule = _schedule(sample_rate, steps, rounds, delta, relation, accountant, noise, epsilon)
    if plot is not None and plot.suffix.lower() != ".png":
        raise UsageError(f"--plot writes PNG: give a name that ends in .png (got {plot})")
    console = console_for(False, json_output)
    with _computing(console):
        multiplier, figures, unamplified = _solve(schedule)
        running = _running(schedule, multiplier) if what_if or plot is not None else {}
        table = _over(running, _scaled(schedule.steps, STEP_FACTORS)) if what_if else {}
        if plot is not None:
            from fedplat.plots import plot_what_if

            points = [i / CURVE_POINTS for i in range(1, CURVE_POINTS + 1)]
            curves = _over(running, _scaled(2 * schedule.steps, points))
            plot_what_if(curves, (multiplier, schedule.steps, figures.claimed), plot)
    if json_output:
        typer.echo(json.dumps(_as_json(schedule, multiplier, figures, unamplified, table)))
        return
    _print(console, schedule, multiplier, figures, unamplified)
    if table:
        _print_what_if(console, schedule, multiplier, table)
    if plot is not None:
        console.print(f"picture: {plot}", highlight=False)


@contextmanager
def _computing(console: "Console") -> Iterator[None]:
    with console.status("computing with three accountants …"):
        yield


def _schedule(
    sample_rate: float,
    steps: int,
    rounds: int,
    delta: float,
    relation: str,
    accountant: str,
    noise: float | None,
    epsilon: float | None,
) -> Schedule:
    if not 0 < sample_rate <= 1:
        raise UsageError(f"--sample-rate must be above 0 and at most 1 (got {sample_rate:g}): batch size / records.")
    if steps < 1 or rounds < 1:
        raise UsageError(f"--steps and --rounds must be at least 1 (got {steps} and {rounds}).")
    if steps * rounds > MOST_STEPS:
        raise UsageError(f"--steps × --rounds = {steps * rounds:,} is more than {MOST_STEPS:,}: plan for fewer.")
    if not 0 < delta < 1:
        raise UsageError(f"--delta must be between 0 and 1 (got {delta:g}). Usual: well below 1 / number of records.")
    if (noise is None) == (epsilon is None):
        raise UsageError("give either --noise (for its ε) or --epsilon (for the noise), not both and not neither.")
    if noise is not None and not (math.isfinite(noise) and noise > 0):
        raise UsageError(f"--noise must be > 0 (got {noise:g}): training without noise is not private.")
    if noise is not None and not LEAST_NOISE <= noise <= MOST_NOISE:
        raise UsageError(
            f"--noise must be between {LEAST_NOISE:g} and {MOST_NOISE:g} (got {noise:g}). Usual: 0.5 to 10."
        )
    if epsilon is not None and not (math.isfinite(epsilon) and epsilon > 0):
        raise UsageError(f"--epsilon must be a finite number > 0 (got {epsilon:g}). Usual: 1 to 10.")
    relations, accountants = ("add-remove", "zero-out", "replace-one"), ("pld", "rdp", "prv")
    if relation not in relations:
        raise UsageError(unknown_name("relation", relation, relations))
    if accountant not in accountants:
        raise UsageError(unknown_name("accountant", accountant, accountants))
    names = (cast("Relation", relation), cast("Accountant", accountant))
    return Schedule(sample_rate, steps * rounds, delta, *names, noise, epsilon)


def _solve(schedule: Schedule) -> "tuple[float, Epsilons, float]":
    """Noise, ε by all accountants, and ε of the same noise without amplification by sampling."""
    from privacy import events
    from privacy.accounting import epsilon, epsilons
    from privacy.calibration import solve_noise

    def event(noise: float) -> "DpEvent":
        return events.dp_sgd(schedule.sample_rate, noise, schedule.steps)

    noise = schedule.noise
    if noise is None:
        assert schedule.epsilon is not None
        noise = solve_noise(event, schedule.epsilon, schedule.delta, schedule.relation, schedule.accountant)
    figures = epsilons(event(noise), schedule.delta, schedule.relation, schedule.accountant)
    if not math.isfinite(figures.claimed):
        raise UsageError(f"--noise {noise:g} is too little for any accountant to find a finite ε. Raise it.")
    in_order = events.gaussian(noise, _epochs(schedule))
    return noise, figures, epsilon(in_order, schedule.delta, schedule.relation)


def _epochs(schedule: Schedule) -> int:
    return max(1, math.ceil(schedule.steps * schedule.sample_rate - 1e-9))


def _scaled(steps: int, factors: Sequence[float]) -> list[int]:
    return sorted({max(1, round(steps * factor)) for factor in factors})


def _running(schedule: Schedule, noise: float) -> "dict[float, RunningEpsilon]":
    """ε over steps, for the chosen noise and some around it."""
    from privacy import events
    from privacy.accounting import RunningEpsilon

    # PRV has no running form; PLD is the same figure less 0.01 to 0.02.
    accountant: Accountant = "rdp" if schedule.accountant == "rdp" else "pld"
    noises = [noise if factor == 1 else float(f"{noise * factor:.4g}") for factor in NOISE_FACTORS]
    return {
        z: RunningEpsilon(events.dp_sgd(schedule.sample_rate, z, 1), schedule.delta, schedule.relation, accountant)
        for z in noises
    }


def _over(running: "Mapping[float, RunningEpsilon]", steps: Sequence[int]) -> Curves:
    return {noise: [(count, one.after(count)) for count in steps] for noise, one in running.items()}


def _as_json(
    schedule: Schedule, noise: float, figures: "Epsilons", unamplified: float, table: Curves
) -> dict[str, object]:
    content: dict[str, object] = {
        "epsilon": {"pld": figures.pld, "rdp": figures.rdp, "prv": figures.prv},
        **{key: value for key, value in asdict(figures).items() if key not in ("pld", "rdp", "prv")},
        "sample_rate": schedule.sample_rate,
        "noise_multiplier": noise,
        "steps": schedule.steps,
        "epsilon_without_amplification": unamplified,
    }
    if table:
        rows = [(n, t, e) for n, points in table.items() for t, e in points]
        content["what_if"] = [{"noise_multiplier": n, "steps": t, "epsilon": _finite(e)} for n, t, e in rows]
    return content


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _print(console: "Console", schedule: Schedule, noise: float, figures: "Epsilons", unamplified: float) -> None:
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    asked = f"sample rate {schedule.sample_rate:g}, {schedule.steps:,} steps, δ = {schedule.delta:g}"
    table.add_row("schedule", f"{asked}, {schedule.relation}")
    table.add_row("noise multiplier", f"{noise:g}" + ("  (solved)" if schedule.noise is None else ""))
    for name in ("pld", "rdp", "prv"):
        value: float | None = getattr(figures, name)
        mark = "  [bold]claimed[/]" if name == figures.claimed_by else ""
        table.add_row(f"ε by {name.upper()}", (f"{value:.4f}" if value is not None else "–") + mark)
    table.add_row("ε without sampling", f"{unamplified:.4f}  (shuffled or fixed order, {_epochs(schedule)} epochs)")
    console.print(table, highlight=False)
    for note in figures.notes:
        console.print(f"[dim]{note}[/]", highlight=False)
    console.print(f"\n{_in_words(figures)}", highlight=False)


def _in_words(figures: "Epsilons") -> str:
    odds = math.exp(figures.claimed) if figures.claimed < 700 else math.inf
    factor = f"{odds:.3g}" if odds < 1e6 else "a million or more: next to no protection"
    words = (
        "For any one record, whatever else is known: seeing the model changes an adversary's odds that it was used at "
        f"most by a factor of e^ε = {factor}, except with probability about δ = {figures.delta:g}.\n"
        "This holds if each step draws each record by itself, at random. A shuffled loader must not be accounted like "
        "this: its ε is the one without sampling."
    )
    if figures.witnesses == 1:
        words += f"\nOnly one accountant ({figures.claimed_by.upper()}) takes this event: no second witness."
    return words


def _print_what_if(console: "Console", schedule: Schedule, noise: float, table: Curves) -> None:
    from rich.table import Table

    steps = [count for count, _ in table[noise]]
    shown = Table(title="what if: ε by noise and steps", title_justify="left", box=None, padding=(0, 2, 0, 0))
    shown.add_column("noise", justify="right")
    for count in steps:
        shown.add_column(f"{count:,} steps", justify="right")
    for multiplier, points in table.items():
        cells = [
            f"[bold]{value:.3f}[/]" if multiplier == noise and count == schedule.steps else f"{value:.3f}"
            for count, value in points
        ]
        shown.add_row(f"{multiplier:g}", *cells)
    console.print()
    console.print(shown, highlight=False)
