"""One example more: what else could change for the others? Each of these once moved the sum by far more than C."""

import numpy as np
import pytest
import torch
from torch import nn

from client_app.clipping import ClippedSum
from client_app.handler import Handler
from fedplat.federation import client_name
from fedplat.task import Examples
from fedplat.tasks.digits import Digits
from fedplat.wire import Identity


def clipped_total(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor, clip: float, micro: int):
    total = ClippedSum(model)
    total.reset()
    for rows in torch.arange(len(inputs)).split(micro):
        xs, ys = inputs[rows], targets[rows]
        total.add(lambda x=xs, y=ys: nn.functional.mse_loss(model(x), y, reduction="none").sum(1), clip)
    total.detach()
    return total.total.clone()


@pytest.mark.parametrize("micro", [1, 7, 512])
def test_rounding_of_a_large_sum_does_not_depend_on_one_example(micro):
    """In fp32, 20,000 summands of norm C leave an error of many C, which one more summand deals anew."""
    torch.manual_seed(0)
    model = nn.Linear(16, 16, bias=False)
    inputs, targets = torch.randn(4000, 16) * 30, torch.randn(4000, 16) * 30
    inputs[1:], targets[1:] = inputs[:1], targets[:1]  # all pull in one direction
    with_all = clipped_total(model, inputs, targets, 1.0, micro)
    without_first = clipped_total(model, inputs[1:], targets[1:], 1.0, micro)
    assert float((with_all - without_first).norm()) <= 1 + 1e-6


def test_a_norm_too_small_to_square_in_fp32_is_clipped_all_the_same():
    model = nn.Linear(8, 8, bias=False)
    inputs, targets = torch.full((1, 8), 1e-24), torch.full((1, 8), 1e3)
    total = clipped_total(model, inputs, targets, 1e-25, 1)
    assert 0 < float(total.norm()) <= 1e-25


def test_held_out_examples_are_chosen_one_by_one(tiny_job, monkeypatch):
    """Without the last record of a client, all others are where they were."""
    settings = {"privacy__unit": "sample", "privacy__noise_multiplier": 1.0, "privacy__sample_rate": 0.1}
    job = tiny_job(data__holdout=0.3, data__partition={"kind": "iid"}, cohort__clients=1, **settings)
    data = Handler(job).data
    rows = data.rows("client-0")
    data.parts[0] = data.parts[0][1:]
    data._split.clear()
    fewer = data.rows("client-0")
    for before, after in ((rows.train, fewer.train), (rows.holdout, fewer.holdout)):
        assert len(set(before.tolist()) ^ set(after.tolist())) <= 1
    assert 0.2 < len(rows.holdout) / (len(rows.holdout) + len(rows.train)) < 0.4


class Dropping(Digits):
    """Keeps the masks of its dropout, which any private task might have."""

    seen: list[torch.Tensor] = []  # noqa: RUF012

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(64, 8), nn.Dropout(0.5), nn.Linear(8, 10))

    def augment(self, inputs: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        noise = torch.randn(inputs.shape, generator=generator)
        type(self).seen.append(noise)
        return inputs + noise


def test_dropout_and_augmentation_follow_no_public_seed(tiny_job):
    job = tiny_job(
        task__name=f"{__name__}:Dropping", task__args={}, local__steps=2,
        privacy__unit="sample", privacy__noise_multiplier=1.0, privacy__sample_rate=1.0,
    )  # fmt: skip
    handler = Handler(job)
    examples = Examples(torch.zeros(5, 64), torch.zeros(5, dtype=torch.int64))
    drawn = []
    for _ in range(2):
        Dropping.seen.clear()
        handler.fit(examples, 0.1, Identity(job.digest, 1, 1, client_name(0)))
        drawn.append(torch.cat(Dropping.seen))
    assert not torch.equal(*drawn)
    assert np.isfinite(drawn[0].numpy()).all()
