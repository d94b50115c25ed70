"""What a person sees when a run is over: the result, the pictures, the next step."""

from typing import TYPE_CHECKING

from fedplat.events import PrivacySpent
from fedplat.job import Job
from fedplat.rundir import RunDirectory
from fedplat.summary import Summary, summarise, summarise_clients

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def print_report(run: RunDirectory, job: Job, console: "Console") -> Summary:
    """Draw the plots, print the result and the next steps."""
    summary = summarise(run)
    with console.status("drawing plots …"):
        draw_plots(run, job, summary)
    console.print(result_table(summary, job.evaluation.metric))
    console.print(
        f"[bold]run[/]    {run.path}   (job.toml, events.jsonl, model.safetensors)\n"
        f"[bold]plots[/]  {run.plots / 'curves.png'}   {run.plots / 'clients.png'}\n"
        f"[bold]next[/]   fedplat runs show {run.path} --clients\n"
        + (f"       fedplat budget --run {run.path}   (who has spent how much)\n" if summary.spent else "")
        + f"       fedplat data show {run.job_file}   (who holds which examples)\n"
        f"       fedplat simulate {run.job_file} --set server.strategy=FedAdam --set server.args.eta=0.05\n"
        f"       fedplat job init my-job.toml   (every key, explained)",
        highlight=False,
    )
    return summary


def draw_plots(run: RunDirectory, job: Job, summary: Summary) -> None:
    from fedplat.plots import plot_clients, plot_curves

    plot_curves(summary, job.evaluation.metric, run.plots / "curves.png")
    clients = summarise_clients(run)
    if clients:
        plot_clients(clients, run.plots / "clients.png")


def privacy_line(spent: PrivacySpent, witnesses: int) -> str:
    """ε and δ with what they are about: a number without its unit and relation says nothing."""
    alone = " (one witness)" if witnesses == 1 else ""
    who = "one example of a client" if spent.unit == "sample" else "one client's whole data"
    trust = "; the server is trusted with single updates" if spent.trusts_server else ""
    warning = " [bold red]INSECURE NOISE: not private[/]" if spent.insecure_noise else ""
    return (
        f"[bold green]ε = {spent.epsilon:.3g}[/], δ = {spent.delta:g} for {who} ({spent.relation}, "
        f"{spent.accountant.upper()}, {spent.releases} rounds){alone}{trust}{warning}"
    )


def result_table(summary: Summary, metric: str) -> "Table":
    from rich.table import Table

    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column()
    table.add_column(overflow="fold")
    for name in dict.fromkeys((metric, "loss")):
        value = summary.final(name)
        if value is not None:
            table.add_row(f"test {name}", f"[bold green]{value:.4f}[/]")
    for name in dict.fromkeys((metric, "loss")):
        value = summary.final_on_clients(name)
        if value is not None:
            table.add_row(f"clients' {name}", f"[bold green]{value:.4f}[/] on their held-out examples")
    table.add_row("rounds", f"{summary.rounds} of {summary.planned_rounds} ({summary.reason or summary.status})")
    table.add_row("updates", f"{summary.updates} accepted, {summary.failed} failed, late or refused")
    spent = summary.spent
    if spent is not None:
        table.add_row("privacy", privacy_line(spent, len(summary.witnesses)))
    table.add_row("speed", f"{summary.clients_per_s:.0f} clients/s, {summary.training_s:.1f} s of training rounds")
    table.add_row("traffic", f"{summary.bytes_up / 1e6:.1f} MB up, {summary.bytes_down / 1e6:.1f} MB down")
    if summary.model_sha256:
        table.add_row("model", f"sha256 {summary.model_sha256}")
    return table
