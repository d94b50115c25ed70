"""DP-SGD at a client: what the accountant is told is what happens, whatever the data is."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from client_app.dp_sgd import EXAMPLE_MARGIN, ROUNDING_MARGIN, PrivateTrainer, Randomness, sample_batch
from fedplat.job import Job
from fedplat.task import Examples
from fedplat.tasks.digits import Digits
from privacy.plan import PrivacyPlan, plan_privacy
from privacy.randomness import insecure_stream

LR = 0.5


@pytest.fixture
def private_job(tiny_job):
    """Keyword arguments are `section__key=value`; privacy is per example, its noise given."""

    def make(**settings: object) -> Job:
        privacy = {"unit": "sample", "noise_multiplier": 1.0, "sample_rate": 0.2, "insecure_noise": True}
        defaults = {f"privacy__{key}": value for key, value in privacy.items()}
        return tiny_job(**({"local__steps": 3, "local__lr": LR, "local__batch_size": 20} | defaults | settings))

    return make


class Trained:
    """One client's round, with streams that repeat."""

    def __init__(self, job: Job, examples: Examples, task: Digits | None = None, label: int = 0) -> None:
        torch.manual_seed(0)
        self.job, self.plan, self.task = job, plan_privacy(job), task or Digits(Path(), hidden=8)
        assert self.plan is not None
        self.model = self.task.model()
        self.start = self.flat()
        self.trainer = PrivateTrainer(job, self.plan, self.task, self.model, torch.device("cpu"))
        self.random = Randomness(*(insecure_stream(purpose, label) for purpose in ("sampling", "noise", "counts")))
        generator = torch.Generator().manual_seed(1)
        clip_norm = job.privacy.clip_norm
        self.result, self.clip_norm = self.trainer.train(examples, LR, generator, self.random, clip_norm)

    def flat(self) -> np.ndarray:
        return torch.cat([p.detach().flatten() for p in self.model.parameters()]).double().numpy()

    @property
    def update(self) -> np.ndarray:
        return self.flat() - self.start


@pytest.fixture(scope="module")
def digits() -> Examples:
    return Digits(Path()).data("train")


def none_of(examples: Examples) -> Examples:
    return examples[slice(0, 0)]


def test_an_empty_batch_takes_a_noisy_step(private_job, digits):
    idle = Trained(private_job(local__steps=1), none_of(digits))
    assert idle.result.steps == 1
    expected = LR * 1.0 * (1 + ROUNDING_MARGIN) / 20
    # 610 coordinates: the sample deviation is within 20 % except once in 10¹⁰ (chi-square), and the streams repeat.
    assert idle.update.std() == pytest.approx(expected, rel=0.2)
    assert np.count_nonzero(idle.update) == idle.update.size


class Brittle(nn.Module):
    """Reshapes as many people do; torch refuses that for an empty batch."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.line(x.view(len(x), -1))


class BrittleDigits(Digits):
    def model(self) -> nn.Module:
        return Brittle()


def test_an_empty_batch_never_reaches_the_model(private_job, digits):
    with pytest.raises(RuntimeError):
        Brittle()(none_of(digits).inputs)
    job = private_job(privacy__sample_rate=0.001, local__steps=20)
    assert Trained(job, digits[slice(0, 3)], BrittleDigits(Path())).result.steps == 20


@pytest.mark.parametrize("size", [0, 1, 17, 900])
def test_the_number_of_steps_is_the_plans_whatever_the_data(size, private_job, digits):
    assert Trained(private_job(local__steps=4), digits[slice(0, size)]).result.steps == 4
    epochs = private_job(local__steps=None, local__epochs=2)
    assert Trained(epochs, digits[slice(0, size)]).result.steps == 10  # 2 epochs of ⌈1/0.2⌉


def test_nothing_is_measured(private_job, digits):
    assert Trained(private_job(), digits).result.metrics == {}


def test_noise_is_drawn_once_per_step_however_the_batch_is_cut(private_job, digits):
    """The streams are at the same place afterwards, and both have added the same noise."""
    updates, positions = [], []
    for batch_size, accumulate in ((60, 1), (4, 15), (1, 60)):
        job = private_job(local__batch_size=batch_size, local__accumulate=accumulate, local__steps=2)
        trained = Trained(job, digits[slice(0, 300)])
        updates.append(trained.update)
        positions.append(trained.random.noise.words(4).tolist())
    np.testing.assert_allclose(updates[0], updates[1], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(updates[0], updates[2], rtol=1e-4, atol=1e-6)
    assert positions[0] == positions[1] == positions[2]


def replays(private_job, digits: Examples) -> Iterator[tuple[Trained, Trained]]:
    """Record and replay: D and D′ with the same secret streams, every example in every batch."""
    job = private_job(privacy__sample_rate=1.0, privacy__clip_norm=0.3, local__steps=1)
    for change in (1.0, 1e6, torch.nan):
        data = Examples(digits.inputs[:12].clone(), digits.targets[:12])
        data.inputs[11] *= change
        yield Trained(job, data), Trained(job, data[slice(0, 11)])


def test_one_example_moves_one_step_by_the_clip_norm_over_the_normaliser_at_most(private_job, digits):
    for with_it, without in replays(private_job, digits):
        limit = LR * 0.3 / 20
        assert np.linalg.norm(with_it.update - without.update) <= limit * (1 + EXAMPLE_MARGIN) + 1e-7
        assert with_it.result == without.result
        assert with_it.random.noise.words(2).tolist() == without.random.noise.words(2).tolist()
        assert with_it.random.counts.words(2).tolist() == without.random.counts.words(2).tolist()


def test_the_noise_is_the_same_for_one_example_more(private_job, digits):
    """The normaliser is the plan's: the number of examples must not show in the noise's scale."""
    updates = [Trained(private_job(local__steps=1), none_of(digits)).update]
    job = private_job(local__steps=1, privacy__sample_rate=1.0, privacy__clip_norm=1.0)
    for size in (1, 5):
        examples = Examples(torch.full((size, 64), torch.nan), torch.zeros(size, dtype=torch.long))
        updates.append(Trained(job, examples).update)  # all of them contribute nothing
    np.testing.assert_array_equal(updates[0], updates[1])
    np.testing.assert_array_equal(updates[0], updates[2])


@pytest.mark.parametrize("local", [{"momentum": 0.9}, {"optimizer": "adam"}, {"optimizer": "adamw"},
                                   {"proximal_mu": 0.3}, {"weight_decay": 0.1}])  # fmt: skip
def test_the_optimiser_sees_the_data_only_through_the_noisy_sum(local, private_job, digits):
    """A reference optimiser, fed with noisy gradients that were taken elsewhere, makes the same updates."""
    job = private_job(**{f"local__{key}": value for key, value in local.items()})
    plain = Trained(private_job(local__steps=1), none_of(digits))
    moved = Trained(job, none_of(digits))
    model = Digits(Path(), hidden=8).model()
    with torch.no_grad():
        for parameter, start in zip(model.parameters(), _split(model, plain.start), strict=True):
            parameter.copy_(start)
    anchor = [p.detach().clone() for p in model.parameters()]
    kind = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[job.local.optimizer]
    extra = {"momentum": job.local.momentum} if job.local.momentum else {}
    optimizer = kind(model.parameters(), LR, weight_decay=job.local.weight_decay, **extra)
    for gradient in _noise_gradients(private_job(local__steps=3), digits):
        for p, g, start in zip(model.parameters(), _split(model, gradient), anchor, strict=True):
            p.grad = g + job.local.proximal_mu * (p.detach() - start)
        optimizer.step()
    found = torch.cat([p.detach().flatten() for p in model.parameters()]).double().numpy()
    np.testing.assert_allclose(found, moved.flat(), rtol=1e-3, atol=1e-4)
    if job.local.optimizer != "sgd":
        moments = torch.cat([state["exp_avg_sq"].flatten() for state in optimizer.state.values()])
        assert float(moments.min()) > 0  # with no data at all, what Adam remembers is noise


def _split(model: nn.Module, flat: np.ndarray) -> list[Tensor]:
    sizes = [p.numel() for p in model.parameters()]
    parts = torch.from_numpy(flat).float().split(sizes)
    return [part.view(p.shape) for part, p in zip(parts, model.parameters(), strict=True)]


def _noise_gradients(job: Job, digits: Examples) -> list[np.ndarray]:
    """The noisy gradients of a client without data, from the differences of plain SGD runs of 0, 1, 2 … steps."""
    ends = [Trained(_steps(job, steps), none_of(digits)).update / -LR for steps in range(1, job.local.steps + 1)]
    return [ends[0], *(late - early for early, late in pairwise(ends))]


def _steps(job: Job, steps: int) -> Job:
    return job.model_copy(update={"local": job.local.model_copy(update={"steps": steps})})


def test_an_adaptive_clip_norm_approaches_the_quantile(private_job, digits):
    reached = []
    for start in (0.01, 50.0):
        job = private_job(
            privacy__adaptive={"quantile": 0.5, "lr": 0.5, "count_noise": 2.0}, privacy__clip_norm=start,
            privacy__sample_rate=0.2, local__steps=60, local__batch_size=60, privacy__noise_multiplier=0.5,
        )  # fmt: skip
        trained = Trained(job, digits[slice(0, 300)])
        reached.append(trained.clip_norm)
        norms = _norms(trained, digits[slice(0, 300)])
        share = float(np.mean(norms <= trained.clip_norm))
        assert 0.25 < share < 0.75
    assert all(0.01 < value < 50 for value in reached)


def _norms(trained: Trained, examples: Examples) -> np.ndarray:
    trained.trainer._sum.reset()
    losses = trained.task.loss
    return trained.trainer._sum.add(lambda: losses(trained.model(examples.inputs), examples.targets), 1.0).numpy()


def plan_with(private_job, **privacy: object) -> PrivacyPlan:
    plan = plan_privacy(private_job(**{f"privacy__{key}": value for key, value in privacy.items()}))
    assert plan is not None
    return plan


def test_truncated_batches_are_uniformly_drawn_and_never_too_large(private_job):
    """Each of 20 rows is kept with probability E[min(B, 5)]/20; 6 σ of 20 counts: a false alarm once in 10⁷."""
    plan, stream = plan_with(private_job, sample_rate=0.5, max_batch=5), insecure_stream("truncated")
    draws = [sample_batch(stream, 20, plan) for _ in range(4000)]
    assert max(map(len, draws)) == 5
    assert all((np.diff(rows) > 0).all() and rows.min() >= 0 and rows.max() < 20 for rows in draws if len(rows))
    counts = np.bincount(np.concatenate(draws), minlength=20)
    expected = sum(map(len, draws)) / 20
    assert np.abs(counts - expected).max() < 6 * np.sqrt(expected)


def test_a_batch_that_fits_is_not_touched(private_job):
    limited, free = plan_with(private_job, max_batch=50), plan_with(private_job)
    one, other = (sample_batch(insecure_stream("same"), 50, plan) for plan in (limited, free))
    np.testing.assert_array_equal(one, other)


def test_an_exception_leaves_nothing_behind_for_the_next_client(private_job, digits):
    class Failing(Digits):
        armed = False

        def loss(self, outputs, targets):
            if self.armed:
                raise RuntimeError("in the middle")
            return super().loss(outputs, targets)

    trained = Trained(private_job(), digits, task := Failing(Path(), hidden=8))
    expected = trained.update
    task.armed = True
    with pytest.raises(RuntimeError, match="in the middle"):
        _again(trained, digits)
    task.armed = False
    _again(trained, digits)
    np.testing.assert_array_equal(trained.update, expected)


def _again(trained: Trained, examples: Examples) -> None:
    with torch.no_grad():
        for parameter, start in zip(trained.model.parameters(), _split(trained.model, trained.start), strict=True):
            parameter.copy_(start)
    streams = Randomness(*(insecure_stream(purpose, 0) for purpose in ("sampling", "noise", "counts")))
    trained.trainer.train(examples, LR, torch.Generator().manual_seed(1), streams, trained.job.privacy.clip_norm)
