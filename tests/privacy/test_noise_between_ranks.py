"""Ranks of one site draw noise that has nothing in common: not the same, not shifted, not under one seed, not after a
fork.

Two processes train the same job for the same client, as ranks would. If their noise were drawn from one stream, each
would cancel the other's, or the sum would have less variance than was accounted.
"""

import multiprocessing
from multiprocessing.connection import Connection

import numpy as np
import pytest
import torch
from scipy import fft, stats

from client_app.dp_sgd import ROUNDING_MARGIN
from client_app.handler import Handler
from fedplat.job import Job
from fedplat.wire import Identity

STEPS = 400
FALSE_ALARM = 1e-6
"""Of each test below."""


def draw(handler: Handler) -> np.ndarray:
    """Noise as it reaches the parameters: private steps with empty batches, through the trainer's own path."""
    trainer = handler._private
    (randomness,) = handler.randomness([Identity(handler.digest, 1, 1, "client-0")])
    trainer.attach_gradients()
    steps = []
    for _ in range(STEPS):
        empty, generator = torch.empty(0, dtype=torch.long), torch.Generator()
        trainer.noisy_gradient(handler.data.examples, empty, generator, randomness.noise, 1.0)
        steps.append(torch.cat([p.grad.flatten() for p in handler.model.parameters()]).numpy().copy())
    return np.concatenate(steps)


def as_rank(canonical_job: str, pipe: Connection, warm: Handler | None = None) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)  # what ranks usually do, and what must not matter
    pipe.send(draw(warm or Handler(Job.from_canonical(canonical_job))))


def ranks(job: Job, method: str, warm: Handler | None) -> list[np.ndarray]:
    context = multiprocessing.get_context(method)
    pipes, processes = [], []
    for _ in range(2):
        ours, theirs = context.Pipe()
        process = context.Process(target=as_rank, args=(job.canonical(), theirs, warm))
        process.start()
        pipes.append(ours)
        processes.append(process)
    found = [pipe.recv() if pipe.poll(120) else None for pipe in pipes]
    for process in processes:
        process.join(30)
    return found


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_noise_of_two_ranks_is_uncorrelated_at_every_shift(method, tiny_job):
    privacy = {"unit": "sample", "noise_multiplier": 2.0, "sample_rate": 0.2}
    job = tiny_job(**{f"privacy__{key}": value for key, value in privacy.items()})
    warm = Handler(job) if method == "fork" else None
    mine = [draw(warm)] if warm is not None else []  # streams that exist before the fork
    noises = [*ranks(job, method, warm), *mine]
    size = len(noises[0])
    for noise in noises:
        expected = 2.0 * (1 + ROUNDING_MARGIN) / job.local.batch_size
        chi_square = float(np.square(noise.astype(np.float64)).sum()) / expected**2
        assert stats.chi2(size).ppf(FALSE_ALARM / 2) < chi_square < stats.chi2(size).isf(FALSE_ALARM / 2)
    for i, one in enumerate(noises):
        for other in noises[:i]:
            # Under independence each circular correlation is N(0, 1) up to 1/size; Bonferroni over all shifts.
            spectra = fft.rfft(one / one.std()), fft.rfft(other / other.std())
            scores = fft.irfft(spectra[0] * np.conj(spectra[1]), size) / np.sqrt(size)
            assert float(np.abs(scores).max()) < stats.norm.isf(FALSE_ALARM / (2 * size))
