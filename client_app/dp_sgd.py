"""DP-SGD (Abadi et al. 2016) at a client: Poisson batch → clipped sum → noise once → divide by a public constant →
step.

Opacus supplies kernels for the layers; the plumbing is ours, because each of these is a claim that the accountant
relies on: every example is in a batch independently with probability q (empty batches take a noisy step too); the
number of steps is fixed; a logical step owns its micro-batches and draws noise exactly once, from cryptographic
randomness; the sum is divided by the plan's normaliser, never by the batch's size. Momentum, Adam, weight decay, the
proximal term and SCAFFOLD's correction come after the noise: they only post-process it.
"""

import multiprocessing
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from client_app.clipping import ClippedSum
from client_app.local import Corrections, LocalResult, make_optimizer
from client_app.weighted_sums import SUM_MARGIN
from fedplat.job import Job
from fedplat.task import Examples, Task, example_losses
from fedplat.wire import Identity
from privacy.clip_norm import next_clip_norm, noisy_share
from privacy.gaussian import add_gaussian
from privacy.noise_ahead import NoiseAhead
from privacy.randomness import Keystream, insecure_stream, secure_stream

if TYPE_CHECKING:
    from privacy.plan import PrivacyPlan

EXAMPLE_MARGIN = 2.0**-10
"""An example's own fp32 gradient may change in its last bits with its place in the batch: a margin, not a proof."""
ROUNDING_MARGIN = EXAMPLE_MARGIN + SUM_MARGIN
"""Noise is that much (2⁻⁷) larger than the plan says, also where a sum is in float64: a batch's size is private."""
WORTH_A_PROCESS = 1 << 17
"""Normals per step from which noise is made ahead on another core."""
PURPOSES = ("sampling", "noise", "counts")


@dataclass(frozen=True)
class Randomness:
    """Secret streams of one client's round: who is in a batch, and the noise. They never share a key."""

    sampling: Keystream
    noise: Keystream | NoiseAhead
    counts: Keystream


class RandomnessSource:
    """Secure streams for the life of this process, or streams named by the request under the insecure test flag."""

    def __init__(self, plan: "PrivacyPlan", normals_per_step: int) -> None:
        self._insecure = plan.section.insecure_noise
        is_worker = multiprocessing.parent_process() is not None
        self._ahead = normals_per_step >= WORTH_A_PROCESS and not is_worker and (os.cpu_count() or 1) > 1
        self._normals = normals_per_step
        self._secure: Randomness | None = None

    def streams(self, seed: int, identities: Sequence[Identity]) -> list[Randomness]:
        """One set of secret streams for all these requests, or (insecurely) one that each request names."""
        if not self._insecure:
            return [self._secret()]
        return [
            Randomness(*(insecure_stream(purpose, seed, one.client, one.round, one.attempt) for purpose in PURPOSES))
            for one in identities
        ]

    def _secret(self) -> Randomness:
        if self._secure is None:
            noise = secure_stream()
            ahead = NoiseAhead(noise, 2 * self._normals) if self._ahead else noise
            self._secure = Randomness(secure_stream(), ahead, secure_stream())
        return self._secure


def sample_batch(stream: Keystream, size: int, plan: "PrivacyPlan") -> np.ndarray:
    """Rows of a Poisson batch; one that is too large for `max_batch` loses a uniformly drawn rest."""
    rows = stream.uniform_rows(size, plan.sample_rate)
    limit = plan.section.max_batch
    if limit is None or len(rows) <= limit:
        return rows
    for last in range(len(rows) - 1, len(rows) - 1 - (len(rows) - limit), -1):  # Fisher-Yates from the end
        other = stream.below(last + 1)
        rows[last], rows[other] = rows[other], rows[last]
    return np.sort(rows[:limit])


class PrivateTrainer:
    """Trains one resident model for one client after another, with per-example privacy."""

    def __init__(self, job: Job, plan: "PrivacyPlan", task: Task, model: nn.Module, device: torch.device) -> None:
        self._job, self._plan, self._task, self._model, self._device = job, plan, task, model, device
        self._sum = ClippedSum(model)
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._augment = getattr(task, "augment", None)
        self.num_parameters = self._sum.flat.numel()

    def train(
        self,
        examples: Examples,
        lr: float,
        generator: torch.Generator,
        randomness: Randomness,
        clip_norm: float,
        corrections: Corrections = (),
    ) -> tuple[LocalResult, float]:
        """Train in place from the current weights; returns the result and the clip norm that was reached.

        Nothing else about the data leaves this function: no loss, no batch size, no norm.
        """
        anchor = [p.detach().clone() for p in self._parameters] if self._job.proximal_mu else []
        self.attach_gradients()
        optimizer = make_optimizer(self._job.local, self._parameters, lr)
        for _ in range(self._plan.steps):
            rows = torch.from_numpy(sample_batch(randomness.sampling, len(examples), self._plan))
            below = self.noisy_gradient(examples, rows, generator, randomness.noise, clip_norm)
            self._post_process(anchor, corrections)
            optimizer.step()
            clip_norm = self._adapted(clip_norm, below, len(rows), randomness.counts)
        for parameter in self._parameters:
            parameter.grad = None
        return LocalResult(self._plan.steps, {}), clip_norm

    def attach_gradients(self) -> None:
        """Make the noisy sum the parameters' gradients."""
        for parameter, gradient in self._sum.gradients().items():
            parameter.grad = gradient

    def noisy_gradient(
        self,
        examples: Examples,
        rows: Tensor,
        generator: torch.Generator,
        noise: Keystream | NoiseAhead,
        clip_norm: float,
    ) -> float:
        """One logical step up to the optimiser: parameters' gradients; returns how many norms were within."""
        below = self._clipped_sum(examples, rows, generator, clip_norm)
        self._add_noise(noise, clip_norm)
        return below

    def _clipped_sum(self, examples: Examples, rows: Tensor, generator: torch.Generator, clip_norm: float) -> float:
        """One logical step: all of its micro-batches into one sum; returns how many norms were within the clip norm."""
        self._sum.reset(len(rows), clip_norm)
        below = 0.0
        if len(rows) == 0:  # not every model takes an empty batch, and none may fail on one
            return below
        for micro in rows.split(min(2 * self._job.local.batch_size, self._sum.micro_batch)):
            batch = examples[micro]
            norms = self._sum.add(partial(self._losses, batch, generator), clip_norm)
            if self._plan.count_noise is not None:
                below += float((norms <= clip_norm).sum())
        return below

    def _losses(self, batch: Examples, generator: torch.Generator) -> Tensor:
        inputs = self._augment(batch.inputs, generator) if self._augment else batch.inputs
        losses, _ = example_losses(self._task, self._model(inputs.to(self._device)), batch.targets.to(self._device))
        return losses

    def _add_noise(self, noise: "Keystream | NoiseAhead", clip_norm: float) -> None:
        """sum + N(0, (z·C)²), divided by the normaliser: the parameters' gradients."""
        total, std = self._sum.total, self._plan.update_noise * clip_norm * (1 + ROUNDING_MARGIN)
        if total.device.type == "cpu":
            add_gaussian(total.numpy(), std, noise, out=total.numpy())
        else:
            total.copy_(torch.from_numpy(add_gaussian(total.cpu().numpy(), std, noise)))
        torch.mul(total, 1 / self._plan.normaliser, out=self._sum.flat)

    def _adapted(self, clip_norm: float, below: float, examples: int, stream: Keystream) -> float:
        adaptive, count_noise = self._plan.section.adaptive, self._plan.count_noise
        if adaptive is None or count_noise is None:
            return clip_norm
        share = noisy_share(below, examples, self._plan.normaliser, count_noise, stream)
        return next_clip_norm(clip_norm, share, adaptive)

    def _post_process(self, anchor: list[Tensor], corrections: Corrections) -> None:
        for parameter, start in zip(self._parameters, anchor, strict=False):
            assert parameter.grad is not None
            parameter.grad.add_(parameter.detach() - start, alpha=self._job.proximal_mu)
        for parameter, correction in corrections:
            assert parameter.grad is not None
            parameter.grad.add_(correction)
