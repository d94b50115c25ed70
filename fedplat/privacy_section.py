"""`[privacy]`: what a job promises about privacy. A job without this section trains without differential privacy.

The section says what is protected (`unit`), how strongly (`epsilon`, `delta`) and by what means (`clip_norm`, noise,
sampling). Everything in it is public. `privacy.plan` turns it into one plan: mechanism, sampler and event together.
"""

from typing import Annotated, Literal

from pydantic import Field, StrictBool, StrictFloat, StrictInt, field_validator, model_validator

from fedplat.job_sections import Count, Positive, Section

Unit = Literal["sample", "client"]
Relation = Literal["add-remove", "zero-out", "replace-one"]
LEAST_NOISE, MOST_NOISE = 1e-3, 1e9
"""Between these every accountant and the noise grid work. Tests with insecure noise may add less."""
Noise = Annotated[float, Field(ge=LEAST_NOISE, le=MOST_NOISE, strict=True)]
Rate = Annotated[float, Field(gt=0, le=1, strict=True)]


class AdaptiveClip(Section):
    """A clip norm that follows a quantile of the norms (Andrew et al. 2021); its noisy counts are part of the claim."""

    quantile: StrictFloat = Field(0.5, gt=0, lt=1)
    """Share of norms that should lie below the clip norm."""
    lr: Positive = 0.2
    """Step of the geometric update."""
    count_noise: Noise | None = None
    """Standard deviation of the noise on the count; default: a twentieth of the expected batch (or cohort), at
    least the noise multiplier."""


class PrivacySection(Section):
    """Differential privacy: what is protected, how strongly, by what means."""

    unit: Unit
    """sample: one example of a site, by DP-SGD inside each client. client: one client's whole data, by clipping
    updates and noise at the server, which is trusted with them."""
    epsilon: Positive | None = None
    """Target ε of the whole job: the noise is solved for it."""
    delta: StrictFloat = Field(1e-5, gt=0, lt=1)
    """δ of the claim: well below one over the number of examples (or clients)."""
    noise_multiplier: StrictFloat | None = None
    """Standard deviation of the noise over clip_norm. Instead of epsilon, or beside it: then it must suffice."""
    clip_norm: StrictFloat = Field(1.0, ge=1e-6, le=1e6)
    """L2 bound on one example's gradient (or one client's update); where an adaptive one starts."""
    adaptive: AdaptiveClip | None = None
    """Adapt the clip norm: a table, {} for its defaults."""
    accountant: Literal["pld", "rdp", "prv"] = "pld"
    """Whose ε is claimed for this job; the others are computed as witnesses."""
    sample_rate: Rate | None = None
    """unit sample: probability that an example is in a step's batch, the same at all sites, whatever they hold.
    In a simulation the default makes the mean batch local.batch_size × local.accumulate."""
    max_batch: Count | None = None
    """unit sample: truncate Poisson batches at this size (bounded memory). The claim then treats each site's number of
    examples as public (relation zero-out) and carries a small additional δ."""
    participations: Count | None = None
    """unit sample: rounds in which one client may take part; more are refused. Default: what the cohorts need."""
    spare_rounds: StrictInt = Field(2, ge=0, le=1000)
    """Rounds beyond the plan that the noise also covers: a retry or a round repeated after a crash is a new spend."""
    sampling: Literal["poisson", "fixed", "none", "banded"] = "poisson"
    """unit client: how cohorts are drawn, and so accounted. poisson: each client with probability cohort.fraction;
    fixed: exactly so many (relation replace-one); none: as they come, no amplification; banded: as they come, with
    noise correlated over rounds (DP-FTRL by banded matrix factorisation)."""
    min_separation: Count | None = None
    """sampling banded: a client takes part at most once in so many rounds; it is also the number of bands."""
    evaluation_noise: Noise | None = None
    """Noise multiplier of each client's released metrics. Without it, clients release no metric at all."""
    convert_model: StrictBool = False
    """Replace layers that can't be private (BatchNorm) by ones that can (GroupNorm) instead of refusing the model."""
    insecure_noise: StrictBool = False
    """FOR TESTS ONLY: noise and sampling from the job's seed. Not private; ledger and results say so."""

    @field_validator("noise_multiplier")
    @classmethod
    def _is_noise(cls, value: float | None) -> float | None:
        if value is not None and value <= 0:
            raise ValueError(f"must be > 0 (got {value}): without noise nothing is private. Remove [privacy] instead")
        if value is not None and value > MOST_NOISE:
            raise ValueError(f"must be at most {MOST_NOISE:g} (got {value:g}): nothing would be left of any model")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> "PrivacySection":
        if self.epsilon is None and self.noise_multiplier is None:
            raise ValueError("give privacy.epsilon (the noise is solved for it) or privacy.noise_multiplier")
        if self.noise_multiplier is not None and self.noise_multiplier < LEAST_NOISE and not self.insecure_noise:
            raise ValueError(
                f"privacy.noise_multiplier must be at least {LEAST_NOISE:g} (got {self.noise_multiplier:g}): with "
                "less, ε is beyond a hundred thousand, which protects nobody. Usual: 0.5 to 10"
            )
        _only(self, "sample", "sample_rate", "max_batch", "participations")
        _only(self, "client", "min_separation")
        if self.unit == "sample" and self.sampling != "poisson":
            raise ValueError(f"privacy.sampling = '{self.sampling}' is for unit client; examples are Poisson-sampled")
        if (self.sampling == "banded") != (self.min_separation is not None):
            raise ValueError("privacy.sampling = 'banded' and privacy.min_separation belong together")
        if self.sampling == "banded" and self.adaptive is not None:
            raise ValueError("privacy.adaptive needs independent noise in every round: not with sampling = 'banded'")
        return self

    @property
    def relation(self) -> Relation:
        """Which data sets count as neighbours in the claim."""
        if self.unit == "sample":
            return "zero-out" if self.max_batch is not None else "add-remove"
        return "replace-one" if self.sampling == "fixed" else "add-remove"


def _only(section: PrivacySection, unit: Unit, *keys: str) -> None:
    for key in keys:
        if getattr(section, key) is not None and section.unit != unit:
            raise ValueError(f"privacy.{key} is for unit {unit}")
