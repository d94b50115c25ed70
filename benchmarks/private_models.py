"""The four models of the privacy benchmark, their batches, and Opacus around them."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from fedplat.tasks.mnist import Mnist

LR, MOMENTUM, CLIP = 0.01, 0.9, 1.0
OPACUS_MODES = ("hooks", "functorch", "ew", "ghost")


def _mlp(hidden: int) -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 10)
    )


def _cifar_cnn() -> nn.Module:
    """Six 3×3 convolutions with GroupNorm."""

    def block(inputs: int, outputs: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(outputs // 4, outputs), nn.ReLU()]

    return nn.Sequential(
        *block(3, 32), *block(32, 32), nn.MaxPool2d(2), *block(32, 64), *block(64, 64), nn.MaxPool2d(2),
        *block(64, 128), *block(128, 128), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(2048, 32), nn.ReLU(),
        nn.Linear(32, 10),
    )  # fmt: skip


@dataclass(frozen=True)
class Subject:
    name: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    repeat: int

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return self.make()

    def batch(self, size: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1)
        return torch.randn(size, *self.shape, generator=generator), torch.randint(0, 10, (size,), generator=generator)

    @property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.make().parameters())


SUBJECTS = (
    Subject("MLP 269k", lambda: _mlp(256), (1, 28, 28), 15),
    Subject("MLP 1.86M", lambda: _mlp(1024), (1, 28, 28), 9),
    Subject("MNIST CNN 26k", Mnist(Path(), "dpcnn").model, (1, 28, 28), 15),
    Subject("CIFAR CNN 354k", _cifar_cnn, (3, 32, 32), 5),
)


def plain_step(subject: Subject, size: int) -> Callable[[], None]:
    model, (inputs, targets) = subject.model(), subject.batch(size)
    optimizer = torch.optim.SGD(model.parameters(), LR, momentum=MOMENTUM)

    def step() -> None:
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()

    return step


def opacus_step(subject: Subject, size: int, mode: str, noise: float) -> Callable[[], None]:
    """One step of Opacus on a fixed batch, as its own engine sets it up."""
    from opacus import PrivacyEngine

    model, (inputs, targets) = subject.model(), subject.batch(size)
    optimizer: Any = torch.optim.SGD(model.parameters(), LR, momentum=MOMENTUM)
    criterion: Any = nn.CrossEntropyLoss()
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=size)
    made = PrivacyEngine(accountant="rdp").make_private(
        module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=noise, max_grad_norm=CLIP,
        criterion=criterion, poisson_sampling=False, grad_sample_mode=mode,
    )  # fmt: skip
    private, optimizer = made[0], made[1]
    criterion = made[2] if mode == "ghost" else criterion

    def step() -> None:
        optimizer.zero_grad()
        criterion(private(inputs), targets).backward()
        optimizer.step()

    return step
