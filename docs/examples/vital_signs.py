"""A task of your own: two things learned at once from made-up vital signs of made-up patients.

    PYTHONPATH=docs/examples fedplat simulate docs/examples/vital_signs.toml

Shows everything a task can do: its own data, a model with two heads, named losses with weights
(multi-task), a metric, augmentation, and keys so that all records of a patient stay at one site.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedplat.task import Examples, Split, Task


class TwoHeads(nn.Module):
    """A shared body, one head for the risk class and one for the length of stay."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(12, width), nn.ReLU())
        self.risk = nn.Linear(width, 2)
        self.stay = nn.Linear(width, 1)

    def forward(self, signs: Tensor) -> dict[str, Tensor]:
        shared = self.body(signs)
        return {"risk": self.risk(shared), "stay": self.stay(shared).squeeze(1)}


class VitalSigns(Task):
    loss_weights: Mapping[str, float] = {"risk": 1.0, "stay": 0.3}

    def __init__(self, data_dir: Path, patients: int = 300, width: int = 32, jitter: float = 0.05) -> None:
        self.patients, self.width, self.jitter = patients, width, jitter

    def model(self) -> nn.Module:
        return TwoHeads(self.width)

    def data(self, split: Split) -> Examples:
        rng = np.random.default_rng(0 if split == "train" else 1)
        patient = np.repeat(np.arange(self.patients), 4)  # four records of each patient
        frailty = rng.normal(size=self.patients)[patient]
        signs = rng.normal(size=(len(patient), 12)) + 0.8 * frailty[:, None]
        risk = (signs[:, :4].sum(1) + 0.5 * rng.normal(size=len(patient)) > 0).astype(np.float64)
        stay = 2.0 + frailty + 0.1 * rng.normal(size=len(patient))
        return Examples(
            inputs=torch.tensor(signs, dtype=torch.float32),
            targets=torch.tensor(np.stack([risk, stay], axis=1), dtype=torch.float32),
            labels=risk.astype(np.int64),
            keys=tuple(f"patient-{p}" for p in patient),
        )

    def loss(self, outputs: Any, targets: Tensor) -> Mapping[str, Tensor]:
        """One value per example and loss: fedplat weights, sums and averages them."""
        return {
            "risk": functional.cross_entropy(outputs["risk"], targets[:, 0].long(), reduction="none"),
            "stay": functional.mse_loss(outputs["stay"], targets[:, 1], reduction="none"),
        }

    def metrics(self, outputs: Any, targets: Tensor) -> Mapping[str, Tensor]:
        right = outputs["risk"].argmax(1) == targets[:, 0].long()
        return {"accuracy": right.float(), "days_off": (outputs["stay"] - targets[:, 1]).abs()}

    def augment(self, inputs: Tensor, generator: torch.Generator) -> Tensor:
        return inputs + self.jitter * torch.randn(inputs.shape, generator=generator)
