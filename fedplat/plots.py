"""Pictures of a run, a comparison, a sweep and a partition. Drawn off-screen, saved as PNG."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedplat.summary import ClientSummary, Summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, GREY = "#1f6fb4", "#e07b39", "#888888"


def _figure(columns: int, title: str) -> "tuple[Figure, list[Axes]]":
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2 * columns, 3.8), dpi=120, layout="constrained")
    axes = [figure.add_subplot(1, columns, i + 1) for i in range(columns)]
    figure.suptitle(title, fontsize=11)
    for axis in axes:
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _curve(axis: "Axes", table: Mapping[int, Mapping[str, float]], metric: str, label: str, color: str | None) -> None:
    points = [(number, values[metric]) for number, values in sorted(table.items()) if metric in values]
    if points:
        axis.plot(*zip(*points, strict=True), label=label, color=color, linewidth=1.6)


def plot_curves(summary: Summary, metric: str, path: Path) -> None:
    """Loss and the watched metric over rounds."""
    figure, (left, right) = _figure(2, f"{Path(summary.run).name}: {summary.clients} clients")
    _curve(left, summary.train, "loss", "training (cohort)", GREY)
    _curve(left, summary.server, "loss", "test", BLUE)
    _curve(left, summary.on_clients, "loss", "clients' held-out", ORANGE)
    left.set(xlabel="round", ylabel="loss")
    _curve(right, summary.server, metric, "test", BLUE)
    _curve(right, summary.on_clients, metric, "clients' held-out", ORANGE)
    right.set(xlabel="round", ylabel=metric)
    if summary.best_round is not None and metric in summary.server.get(summary.best_round, {}):
        value = summary.server[summary.best_round][metric]
        right.plot([summary.best_round], [value], "o", color=BLUE)
        right.annotate(
            f"best {value:.4f}",
            (summary.best_round, value),
            (-12, -16),
            textcoords="offset points",
            ha="right",
        )
    if summary.spent is not None:
        _epsilon_axis(right, summary)
    for axis in (left, right):
        if axis.lines:
            axis.legend(frameon=False)
    _save(figure, path)


def _epsilon_axis(axis: "Axes", summary: Summary) -> None:
    """ε over rounds on its own scale: what the metric beside it has cost."""
    assert summary.spent is not None
    other = axis.twinx()
    rounds = sorted(summary.privacy)
    other.plot(rounds, [summary.privacy[r].epsilon for r in rounds], color=ORANGE, linestyle="--", linewidth=1.2)
    other.set_ylabel(f"ε at δ = {summary.spent.delta:g} (dashed)", color=ORANGE)
    other.set_ylim(bottom=0)
    other.spines[["top"]].set_visible(False)


def plot_clients(clients: Mapping[str, ClientSummary], path: Path) -> None:
    """How clients differ: loss against amount of data, how often each took part, size of updates."""
    figure, (left, middle, right) = _figure(3, f"{len(clients)} clients that took part")
    sizes = [client.num_examples for client in clients.values()]
    left.scatter(sizes, [client.losses[-1] for client in clients.values()], s=14, alpha=0.6, color=BLUE)
    left.set(xlabel="examples", ylabel="last training loss")
    _histogram(middle, [len(client.rounds) for client in clients.values()])
    middle.set(xlabel="rounds taken part in", ylabel="clients")
    right.scatter(sizes, [float(np.mean(c.norms)) for c in clients.values()], s=14, alpha=0.6, color=ORANGE)
    right.set(xlabel="examples", ylabel="mean update norm")
    _save(figure, path)


def plot_comparison(summaries: Sequence[Summary], metric: str, path: Path) -> None:
    """The same metric of several runs in one picture, over rounds and over training time."""
    figure, (left, right) = _figure(2, f"{metric} at the server")
    for summary in summaries:
        measured, label = summary.server, Path(summary.run).name
        if not measured:  # evaluation.server = false: clients are the only ones who measure
            measured, label = summary.on_clients, f"{label} (clients' held-out)"
        _curve(left, measured, metric, label, None)
        points = [(n, v[metric]) for n, v in sorted(measured.items()) if metric in v]
        per_round = summary.training_s / summary.rounds if summary.rounds else 0.0
        if points:
            right.plot([n * per_round for n, _ in points], [v for _, v in points], label=label, linewidth=1.6)
    left.set(xlabel="round", ylabel=metric)
    right.set(xlabel="training seconds", ylabel=metric)
    left.legend(frameon=False, fontsize=8)
    _save(figure, path)


def plot_sweep(settings: Mapping[str, Sequence[Summary]], metric: str, path: Path) -> None:
    """The mean curve of every setting of a sweep, with a band from the least to the greatest of its seeds.

    Settings come best first; what doesn't fit into the colours is drawn grey.
    """
    from matplotlib import colormaps

    metrics = list(dict.fromkeys((metric, "loss")))
    figure, axes = _figure(len(metrics), f"{len(settings)} settings, at the server")
    colors = colormaps["tab10"]
    for position, (name, runs) in enumerate(settings.items()):
        coloured = position < colors.N
        label = name if coloured else ("others" if position == colors.N else "_")
        for axis, shown in zip(axes, metrics, strict=True):
            _band(axis, runs, shown, label, colors(position) if coloured else GREY)
    for axis, shown in zip(axes, metrics, strict=True):
        axis.set(xlabel="round", ylabel=shown)
    handles, labels = axes[0].get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower center", frameon=False, fontsize=8, ncols=2)
    _save(figure, path)


def _band(axis: "Axes", runs: Sequence[Summary], metric: str, label: str, color: object) -> None:
    """Mean, minimum and maximum over runs, at the rounds that all of them evaluated."""
    tables = [{number: values[metric] for number, values in run.server.items() if metric in values} for run in runs]
    rounds = sorted(set.intersection(*(set(table) for table in tables))) if tables else []
    if not rounds:
        return
    values = np.array([[table[number] for number in rounds] for table in tables])
    axis.plot(rounds, values.mean(axis=0), label=label, color=color, linewidth=1.6)
    if len(runs) > 1:
        axis.fill_between(rounds, values.min(axis=0), values.max(axis=0), color=color, alpha=0.15, linewidth=0)


def plot_partition(parts: Sequence[np.ndarray], labels: np.ndarray | None, title: str, path: Path) -> None:
    """Examples per client, coloured by label where there are labels."""
    figure, (left, right) = _figure(2, title)
    clients = np.arange(len(parts))
    if labels is None:
        left.bar(clients, [len(part) for part in parts], width=1.0, color=BLUE)
    else:
        _stacked(left, label_counts(parts, labels))
    left.set(xlabel="client", ylabel="examples")
    _histogram(right, [len(part) for part in parts])
    right.set(xlabel="examples per client", ylabel="clients")
    _save(figure, path)


def plot_what_if(
    curves: Mapping[float, Sequence[tuple[int, float]]], chosen: tuple[float, int, float], path: Path
) -> None:
    """ε over steps, one curve per noise multiplier; `chosen` (noise, steps, ε) is the thick one, with its point."""
    figure, (axis,) = _figure(1, "privacy spent over training")
    noise, steps, epsilon = chosen
    for position, (multiplier, points) in enumerate(sorted(curves.items()), start=1):
        color, width = (BLUE, 2.4) if multiplier == noise else (f"C{position}", 1.2)
        axis.plot(*zip(*points, strict=True), label=f"noise {multiplier:.4g}", color=color, linewidth=width)
    axis.plot([steps], [epsilon], "o", color=BLUE)
    axis.annotate(f"ε = {epsilon:.3g}", (steps, epsilon), (-8, 8), textcoords="offset points", ha="right")
    axis.set(xlabel="steps", ylabel="ε", ylim=(0, None))
    axis.legend(frameon=False, fontsize=8)
    _save(figure, path)


def _histogram(axis: "Axes", values: Sequence[int]) -> None:
    """A histogram of whole numbers, with one bar per number where there are few."""
    low, high = min(values), max(values)
    bins = np.arange(low, high + 2) - 0.5 if high - low < 40 else np.linspace(low, high, 31)
    axis.hist(values, bins=bins.tolist(), color=BLUE, alpha=0.8, rwidth=0.9)


def label_counts(parts: Sequence[np.ndarray], labels: np.ndarray) -> dict[int, np.ndarray]:
    """For each label, how many examples of it every client has."""
    return {int(label): np.array([np.sum(labels[part] == label) for part in parts]) for label in np.unique(labels)}


def _stacked(axis: "Axes", counts: Mapping[int, np.ndarray]) -> None:
    from matplotlib import colormaps

    colors = colormaps["tab20" if len(counts) > 10 else "tab10"]
    below = np.zeros(len(next(iter(counts.values()))))
    for position, (label, count) in enumerate(counts.items()):
        axis.bar(
            np.arange(len(count)),
            count,
            bottom=below,
            width=1.0,
            color=colors(position % colors.N),
            label=str(label),
        )
        below += count
    if len(counts) <= 20:
        axis.legend(
            title="label", fontsize=6, title_fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False
        )


def _save(figure: "Figure", path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
