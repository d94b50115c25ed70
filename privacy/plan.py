"""A job's privacy as one frozen plan: mechanism, sampler and event together, so that none can change without the
others.

Everything here is public and fixed before training: sample rate, number of steps, clip norm, noise, normaliser.
Nothing depends on what a site holds. `plan_privacy` reads a job; `pin_privacy` writes the solved numbers into it, so
that what is signed, simulated and run at a site is the same job.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from dp_accounting import ComposedDpEvent, DpEvent, SelfComposedDpEvent

from fedplat.errors import UsageError
from fedplat.job import Job
from fedplat.job_sections import JobSection, SimulationSection
from fedplat.privacy_section import PrivacySection, Relation
from privacy.accounting import epsilon as epsilon_of
from privacy.banded import banded_event
from privacy.calibration import solve_noise
from privacy.events import adaptive_clip_noise, dp_sgd, fixed_cohort, gaussian
from privacy.renyi_filter import SLACK_SHARE, truncation_slack

logger = logging.getLogger(__name__)
MOST_STEPS, MOST_JOB_STEPS = 1_000_000, 10_000_000
"""Private steps of a round, and of a job: whoever sends a job puts an accountant to work, at sites too."""
COUNT_SHARE = 1 / 20
"""Andrew et al. 2021: noise of a twentieth of the expected count costs little and hides the count."""


@dataclass(frozen=True)
class PrivacyPlan:
    """What a private job does in every round, and what that costs."""

    section: PrivacySection
    noise_multiplier: float
    """What is accounted: noise over clip norm, for the sum and (if adaptive) its count together."""
    sample_rate: float
    """Of examples in a step (unit sample), of clients in a round (unit client)."""
    steps: int
    """Noisy steps of one round at one client (unit sample); 1 (unit client)."""
    normaliser: float
    """The public constant that noisy sums are divided by: never the actual number of summands."""
    releases: int
    """Rounds that the claim covers: at one client (unit sample), of the federation (unit client)."""
    rounds: int
    clients: int
    evaluations: int

    @property
    def count_noise(self) -> float | None:
        """Standard deviation of the noise on the adaptive clip norm's count."""
        if self.section.adaptive is None:
            return None
        return self.section.adaptive.count_noise or max(self.normaliser * COUNT_SHARE, self.noise_multiplier)

    @property
    def update_noise(self) -> float:
        """Noise multiplier of the sum itself: larger than what is accounted where the count takes its share."""
        if self.count_noise is None:
            return self.noise_multiplier
        return adaptive_clip_noise(self.noise_multiplier, self.count_noise)

    @property
    def relation(self) -> Relation:
        return self.section.relation

    @property
    def round_event(self) -> DpEvent:
        """What one round of training costs (unit sample: each client that takes part)."""
        return dp_sgd(self.sample_rate, self.noise_multiplier, self.steps)

    @property
    def evaluation_event(self) -> DpEvent:
        """What one evaluation at a client costs."""
        if self.section.evaluation_noise is None:
            raise ValueError("this job's clients release no metrics")
        return gaussian(self.section.evaluation_noise)

    def job_event(self, releases: int | None = None) -> DpEvent:
        """What the whole job costs, or its first `releases` rounds."""
        count = self.releases if releases is None else releases
        return self._with_evaluations(self._training_event(count))

    def _training_event(self, releases: int) -> DpEvent:
        section, z = self.section, self.noise_multiplier
        if section.unit == "sample":
            return dp_sgd(self.sample_rate, z, self.steps * releases)
        match section.sampling:
            case "poisson":
                return dp_sgd(self.sample_rate, z, releases)
            case "fixed":
                return fixed_cohort(self.clients, round(self.sample_rate * self.clients), z, releases)
            case "banded":
                return banded_event(self.rounds, section.min_separation or 1, z, section.spare_rounds)
            case _:
                return gaussian(z, releases)

    def _with_evaluations(self, training: DpEvent) -> DpEvent:
        if self.evaluations == 0:
            return training
        return ComposedDpEvent([training, SelfComposedDpEvent(self.evaluation_event, self.evaluations)])

    @property
    def conversion_delta(self) -> float:
        """δ at which events are converted: truncated batches keep one percent of it for their slack."""
        return self.section.delta * (1 - SLACK_SHARE if self.section.max_batch is not None else 1.0)

    def epsilon(self, releases: int | None = None) -> float:
        """The ε claimed for the whole job, fixed in advance, or for its first rounds."""
        return epsilon_of(self.job_event(releases), self.conversion_delta, self.relation, self.section.accountant)

    def truncation_slack(self, examples: int, budget_epsilon: float = 0.0) -> float:
        """The additional δ of one round of truncated batches at a site with so many examples; 0 without truncation.

        It grows with the ε of the claim it is part of: that of a site's whole budget, if this job is charged to one.
        Raises UsageError if the whole job's would exceed its share of δ.
        """
        limit = self.section.max_batch
        if limit is None:
            return 0.0
        epsilon = self.section.epsilon or self.epsilon()
        slack = truncation_slack(examples, self.sample_rate, limit, self.steps, epsilon)
        if slack * self.releases > SLACK_SHARE * self.section.delta:
            raise UsageError(
                f"privacy.max_batch = {limit} is too small for {examples} examples at sample rate "
                f"{self.sample_rate:g}: truncation would cost δ = {slack * self.releases:.2g}. Raise it to about "
                f"{_roomy_batch(examples, self.sample_rate)}"
            )
        return truncation_slack(examples, self.sample_rate, limit, self.steps, max(epsilon, budget_epsilon))


def _roomy_batch(examples: int, rate: float) -> int:
    """A batch that a binomial exceeds less than once in 2⁶⁰ times or so."""
    mean = examples * rate
    return min(examples, math.ceil(mean + 10 * math.sqrt(mean * (1 - rate)) + 30))


def plan_privacy(job: Job) -> PrivacyPlan | None:
    """The plan of a job, its noise solved if the job gives only a target; None without [privacy]."""
    if job.privacy is None:
        return None
    # What no plan depends on is left out: solving takes a second, and a job's engine is settled after its privacy.
    relevant = {"job": JobSection(rounds=job.job.rounds), "simulation": SimulationSection()}
    return _plan(job.model_copy(update=relevant).canonical())


@lru_cache(maxsize=16)
def _plan(canonical_job: str) -> PrivacyPlan:
    job = Job.from_canonical(canonical_job)
    assert job.privacy is not None
    plan = _with_noise(_without_noise(job, job.privacy), job.privacy)
    try:
        _ = plan.update_noise
    except ValueError as error:
        raise UsageError(f"privacy.adaptive.count_noise: {error}") from None
    return plan


def _with_noise(plan: PrivacyPlan, section: PrivacySection) -> PrivacyPlan:
    """The plan with its noise solved, or shown to suffice."""
    target = section.epsilon
    if target is None:
        return plan
    if section.noise_multiplier is None:
        noise = solve_noise(
            lambda z: replace(plan, noise_multiplier=z).job_event(),
            target,
            plan.conversion_delta,
            plan.relation,
            section.accountant,
        )
        return replace(plan, noise_multiplier=noise)
    found = plan.epsilon()
    if found > target:
        raise UsageError(
            f"privacy.noise_multiplier = {plan.noise_multiplier} gives ε = {found:.4g}, more than privacy.epsilon = "
            f"{target:g}. Leave noise_multiplier out to have it solved"
        )
    return plan


def _without_noise(job: Job, section: PrivacySection) -> PrivacyPlan:
    rounds, cohort = job.job.rounds, job.cohort
    if section.unit == "client":
        rate, steps = cohort.cohort_size / cohort.clients, 1
        normaliser, releases = float(cohort.cohort_size), rounds + section.spare_rounds
    else:
        if section.sample_rate is None:
            raise UsageError(
                "privacy.sample_rate is missing: it is public and the same at every site, so the job must say it "
                "(`fedplat simulate` fills it in from the simulated data)"
            )
        rate, steps = section.sample_rate, steps_per_round(job, section.sample_rate)
        normaliser = float(job.local.batch_size * job.local.accumulate)
        releases = min(section.participations or rounds, rounds) + section.spare_rounds
        if steps * releases > MOST_JOB_STEPS:
            raise UsageError(
                f"{releases} rounds of {steps} private steps are {steps * releases} in all: plan for at most "
                f"{MOST_JOB_STEPS}. Lower job.rounds, privacy.participations or local.steps"
            )
    evaluates = job.evaluation.clients > 0
    evaluations = math.ceil(rounds / job.evaluation.every) + section.spare_rounds if evaluates else 0
    noise = section.noise_multiplier or 1.0
    return PrivacyPlan(section, noise, rate, steps, normaliser, releases, rounds, cohort.clients, evaluations)


def steps_per_round(job: Job, sample_rate: float) -> int:
    """Local steps of a round: an epoch of Poisson batches is ⌈1/q⌉ steps, whatever a site holds."""
    steps = job.local.steps or (job.local.epochs or 1) * math.ceil(1 / sample_rate - 1e-9)
    if steps > MOST_STEPS:
        raise UsageError(f"{steps} private steps in a round: give at most {MOST_STEPS}, as local.steps")
    return steps


def pin_privacy(job: Job, sizes: Sequence[int], participations: int) -> Job:
    """The job with every number of its plan written out, as simulated data and cohorts suggest them.

    `sizes` are the simulated clients' numbers of examples, `participations` the most rounds a client is sampled for.
    """
    section = job.privacy
    if section is None:
        return job
    _warn_about_delta(section, sizes)
    if section.unit == "sample":
        pins = {
            "sample_rate": section.sample_rate or _suggested_rate(job, sizes),
            "participations": section.participations or participations,
        }
        job = job.model_copy(update={"privacy": section.model_copy(update=pins)})
    plan = plan_privacy(job)
    assert plan is not None and job.privacy is not None
    noise = {"noise_multiplier": plan.noise_multiplier}
    return job.model_copy(update={"privacy": job.privacy.model_copy(update=noise)})


def _suggested_rate(job: Job, sizes: Sequence[int]) -> float:
    batch, mean = job.local.batch_size * job.local.accumulate, sum(sizes) / len(sizes)
    if batch > max(sizes):
        raise UsageError(
            f"local.batch_size × local.accumulate = {batch}, but no client holds more than {max(sizes)} examples: "
            "lower it, or set privacy.sample_rate"
        )
    if batch > mean:
        logger.warning("clients hold %.1f examples on average, fewer than a batch of %d: sample_rate = 1", mean, batch)
    return min(1.0, float(f"{batch / mean:.6g}"))


def _warn_about_delta(section: PrivacySection, sizes: Sequence[int]) -> None:
    count, what = (max(sizes), "examples at one site") if section.unit == "sample" else (len(sizes), "clients")
    warning = delta_warning(section.delta, count, what)
    if warning is not None:
        logger.warning("privacy.%s", warning)


def delta_warning(delta: float, count: float, what: str) -> str | None:
    """What is wrong with a δ that is not below one over the number of those it protects."""
    if count < 1 or delta < 1 / count:
        return None
    return (
        f"delta = {delta:g} is not below 1/{count:.0f} ({what}): a mechanism that publishes one of them at random "
        f"would pass. Choose well below {1 / count:.1g}"
    )


def expected_delta_warning(job: Job) -> str | None:
    """The same for a job whose sites nobody has counted: a batch over its sample rate is what they should hold."""
    section = job.privacy
    if section is None:
        return None
    if section.unit == "client":
        return delta_warning(section.delta, job.cohort.clients, "clients")
    batch = job.local.batch_size * job.local.accumulate
    return delta_warning(section.delta, batch / (section.sample_rate or 1.0), "examples that a site should have")
