"""The noise that clients really add, measured at the end of the whole path: its scale, its shape, its independence.

Every example's gradient is NaN and so contributes nothing: what a client sends is the noise alone. All limits are set
for a false alarm of at most 10⁻⁶ per test, by the statistic's own distribution.
"""

from collections.abc import Callable
from itertools import combinations

import numpy as np
import pytest
import torch
from flwr.app import RecordDict
from scipy import stats

from client_app.dp_sgd import ROUNDING_MARGIN, WORTH_A_PROCESS
from client_app.handler import Handler, handler_for
from fedplat import wire
from fedplat.federation import client_name
from fedplat.job import Job
from fedplat.model import read_arrays
from fedplat.task import Examples, Split
from fedplat.tasks.digits import Digits
from fedplat.wire import Identity
from privacy.clip_norm import noisy_share
from privacy.randomness import secure_stream
from simulations.private_vector import PrivateStackTrainer
from simulations.vector import ClientPlan

FALSE_ALARM = 1e-6
Z, CLIP, LR, BATCH = 1.3, 0.7, 0.25, 16


class Poisoned(Digits):
    """Examples whose gradients are all NaN."""

    def data(self, split: Split) -> Examples:
        examples = super().data(split)
        return Examples(torch.full_like(examples.inputs, torch.nan), examples.targets)


@pytest.fixture
def noisy_job(tiny_job) -> Callable[..., Job]:
    def make(hidden: int = 128, **settings: object) -> Job:
        return tiny_job(**({
            "task__name": f"{__name__}:Poisoned", "task__args": {"hidden": hidden},
            "local__lr": LR, "local__batch_size": BATCH, "local__steps": 1, "privacy__unit": "sample",
            "privacy__noise_multiplier": Z, "privacy__clip_norm": CLIP, "privacy__sample_rate": 0.1,
        } | settings))  # fmt: skip

    return make


def sent(handler: Handler, client: int = 0, number: int = 1) -> np.ndarray:
    """One client's update from a model of zeros, in units of the clip norm."""
    zeros = {name: np.zeros_like(array) for name, array in read_arrays(handler.state).items()}
    clip = {wire.CLIP_NORM: np.array(CLIP, np.float32)} if handler.plan.section.adaptive is not None else {}
    identity = Identity(handler.digest, number, 0, client_name(client))
    request = RecordDict({wire.ARRAYS: wire.encode_arrays(zeros | clip)})
    reply = wire.decode_arrays(handler.train(request, identity)[wire.ARRAYS])
    flat = np.concatenate([reply[name].ravel() for name in zeros]).astype(np.float64)
    return flat / -LR * BATCH / CLIP


def assert_gaussian(noise: np.ndarray, std: float) -> None:
    """Mean, variance and shape of N(0, std²); a third of the false alarms for each."""
    n, tail = noise.size, FALSE_ALARM / 6
    assert abs(noise.mean()) < stats.norm.isf(tail) * std / np.sqrt(n)
    low, high = stats.chi2.ppf(tail, n), stats.chi2.isf(tail, n)
    assert low < np.sum((noise / std) ** 2) < high
    assert stats.kstest(noise[:20_000] / std, "norm").pvalue > FALSE_ALARM / 3


def assert_independent(rows: list[np.ndarray]) -> None:
    """No two rows are correlated, and no row with its own neighbours; the limit is for all pairs together."""
    pairs = [*combinations(rows, 2), *((row[1:], row[:-1]) for row in rows), *((row[7:], row[:-7]) for row in rows)]
    limit = stats.norm.isf(FALSE_ALARM / 2 / len(pairs))
    for one, other in pairs:
        n = min(one.size, other.size)
        assert abs(np.corrcoef(one[:n], other[:n])[0, 1]) < limit / np.sqrt(n - 3)


def test_noise_of_one_step_is_a_gaussian_of_the_plans_scale(noisy_job):
    handler = handler_for(noisy_job().canonical())
    rows = [sent(handler, client, number) for client in range(3) for number in (1, 2)]
    assert_gaussian(np.concatenate(rows), Z * (1 + ROUNDING_MARGIN))
    assert_independent(rows)


def test_noise_of_the_steps_of_a_round_is_independent(noisy_job):
    """Equal noise in five steps would have five times the deviation, cancelling noise less than √5 times."""
    handler = handler_for(noisy_job(local__steps=5).canonical())
    noise = np.concatenate([sent(handler, client) for client in range(4)])
    assert_gaussian(noise, Z * (1 + ROUNDING_MARGIN) * 5**0.5)


def test_noise_that_is_made_ahead_on_another_thread_is_the_same_kind(noisy_job):
    handler = handler_for(noisy_job(hidden=1800).canonical())
    assert handler._private.num_parameters > WORTH_A_PROCESS
    rows = [sent(handler, 0, number) for number in (1, 2, 3)]
    assert_gaussian(np.concatenate(rows), Z * (1 + ROUNDING_MARGIN))
    assert_independent(rows)


def test_an_adaptive_clip_norm_leaves_more_noise_on_the_update(noisy_job):
    handler = handler_for(noisy_job(privacy__adaptive={"count_noise": 0.9}).canonical())
    expected = (Z**-2 - (2 * 0.9) ** -2) ** -0.5
    assert handler.plan.update_noise == pytest.approx(expected) and expected > Z
    assert_gaussian(np.concatenate([sent(handler, client) for client in range(4)]), expected * (1 + ROUNDING_MARGIN))


@pytest.mark.parametrize("adaptive", [None, {"count_noise": 0.9}])
def test_noise_of_stacked_clients_is_that_of_single_ones(adaptive, noisy_job):
    settings = {} if adaptive is None else {"privacy__adaptive": adaptive}
    handler = handler_for(noisy_job(**settings).canonical())
    trainer = PrivateStackTrainer(handler.job, handler.plan, handler.task, handler.model, handler.data.examples)
    with torch.no_grad():
        for parameter in handler.model.parameters():
            parameter.zero_()
    names = [client_name(i) for i in range(6)]
    plans = [ClientPlan(torch.from_numpy(handler.data.rows(n).train), LR, torch.Generator()) for n in names]
    identities = [Identity(handler.digest, 1, 0, name) for name in names]
    result, _ = trainer.train(plans, handler.randomness(identities), CLIP)
    stacked = torch.cat([p.flatten(1) for p in result.parameters.values()], 1).double().numpy() / -LR * BATCH / CLIP
    assert_gaussian(stacked.ravel(), handler.plan.update_noise * (1 + ROUNDING_MARGIN))
    assert_independent(list(stacked))


def test_the_same_seeds_give_other_noise_unless_the_job_asks_for_insecure_noise(noisy_job):
    def runs(job: Job) -> list[np.ndarray]:
        found = []
        for _ in range(2):
            torch.manual_seed(5)
            np.random.seed(5)
            found.append(sent(Handler(job)))  # a new handler: as after a restart
        return found

    assert_independent(runs(noisy_job()))
    one, other = runs(noisy_job(privacy__insecure_noise=True))
    np.testing.assert_array_equal(one, other)


def test_insecure_noise_is_another_for_every_client_round_attempt_and_job_seed(noisy_job):
    handler = handler_for(noisy_job(privacy__insecure_noise=True).canonical())
    other = handler_for(noisy_job(privacy__insecure_noise=True, job__seed=9).canonical())
    rows = [sent(handler), sent(handler, client=1), sent(handler, number=2), sent(other)]
    assert_gaussian(np.concatenate(rows), Z * (1 + ROUNDING_MARGIN))
    assert_independent(rows)


def test_the_released_share_has_the_counts_noise():
    """Share · normaliser ~ N(below − n/2 + normaliser/2, σ²): 20,000 draws."""
    stream, draws = secure_stream(), 20_000
    shares = np.array([noisy_share(30.0, 40, 50.0, 2.5, stream) for _ in range(draws)])
    assert_gaussian((shares - 0.5) * 50 - 10, 2.5)


def test_the_tests_above_would_notice_a_wrong_scale_and_a_reused_stream():
    generator = np.random.default_rng(0)
    noise = generator.normal(size=9_610)
    with pytest.raises(AssertionError):
        assert_gaussian(generator.normal(scale=1.1, size=9_610), 1.0)
    with pytest.raises(AssertionError):
        assert_gaussian(np.sqrt(3) * generator.uniform(-1, 1, 9_610), 1.0)
    with pytest.raises(AssertionError):
        assert_independent([noise, 0.3 * noise + generator.normal(size=9_610)])
