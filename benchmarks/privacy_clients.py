"""200 simulated private clients: our vector engine beside Opacus one client after another.

The same work on both sides: the digits MLP (64-128-10), 80 examples per client, Poisson batches of 16 on average, five
steps, noise and all. Opacus gets its fastest mode, ghost clipping, and a fresh engine per client, as a Flower client
would have it. Ours makes its noise ahead on the other core, as it does in a simulation.
"""

import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.machine import Row, Section, describe_machine, print_section
from client_app.dp_sgd import RandomnessSource
from fedplat.job import validate_job
from fedplat.task import Examples
from fedplat.tasks.digits import Digits
from privacy.plan import plan_privacy
from simulations.private_vector import PrivateStackTrainer
from simulations.vector import ClientPlan

CLIENTS, EXAMPLES, BATCH, STEPS, CHUNK, LR = 200, 80, 16, 5, 40, 0.1
OPACUS_CLIENTS = 20
"""Opacus is slow enough to measure fewer; its figure is per client."""
TURNS = 5


def _data() -> Examples:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.rand(CLIENTS * EXAMPLES, 64, generator=generator)
    return Examples(inputs, torch.randint(0, 10, (len(inputs),), generator=generator))


def _ours(data: Examples) -> float:
    """Seconds for all clients."""
    job = validate_job(
        {
            "local": {"batch_size": BATCH, "steps": STEPS, "lr": LR},
            "privacy": {"unit": "sample", "noise_multiplier": 1.0, "sample_rate": BATCH / EXAMPLES},
        },
        "benchmark",
    )
    plan, task = plan_privacy(job), Digits(Path())
    assert plan is not None
    model = task.model()
    trainer = PrivateStackTrainer(job, plan, task, model, data)
    streams = RandomnessSource(plan, CHUNK * sum(p.numel() for p in model.parameters())).streams(0, [])
    rows = torch.arange(len(data)).split(EXAMPLES)
    plans = [ClientPlan(own, LR, torch.Generator()) for own in rows]
    started = time.perf_counter()
    for first in range(0, CLIENTS, CHUNK):
        trainer.train(plans[first : first + CHUNK], streams, 1.0)
    return time.perf_counter() - started


def _opacus(data: Examples) -> float:
    """Seconds for a few clients, one by one."""
    from opacus import PrivacyEngine

    task = Digits(Path())
    started = time.perf_counter()
    for client in range(OPACUS_CLIENTS):
        own = data[slice(client * EXAMPLES, (client + 1) * EXAMPLES)]
        model: Any = task.model()
        optimizer: Any = torch.optim.SGD(model.parameters(), LR)
        loader: Any = DataLoader(TensorDataset(own.inputs, own.targets), batch_size=BATCH)
        criterion: Any = nn.CrossEntropyLoss()
        model, optimizer, criterion, loader = PrivacyEngine(accountant="rdp").make_private(
            module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0,
            criterion=criterion, grad_sample_mode="ghost",
        )  # fmt: skip
        for inputs, targets in loader:
            optimizer.zero_grad()
            criterion(model(inputs), targets).backward()
            optimizer.step()
    return time.perf_counter() - started


def measure_clients() -> Section:
    torch.set_num_threads(1)
    data = _data()
    ours = median(_ours(data) for _ in range(TURNS)) / CLIENTS
    opacus = median(_opacus(data) for _ in range(3)) / OPACUS_CLIENTS
    beside = {"ours ms per client": ours * 1e3, "Opacus ms per client": opacus * 1e3}
    row = Row("200 private clients: Opacus one by one over our stacks", opacus / ours, "×", at_least=10, beside=beside)
    how = (
        f"Wall time, one torch thread, {STEPS} Poisson steps of {BATCH} on average, noise 1; stacks of {CHUNK} clients."
    )
    return Section("Many private clients", how, [row])


if __name__ == "__main__":
    print(describe_machine())
    print_section(measure_clients())
