"""The sections of a job file. Each model is at once the validation and the documentation.

`fedplat job schema` prints these descriptions; `fedplat job init` writes a file from these defaults.
Everything is frozen: a job is a value, and its canonical JSON is its identity.
"""

from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    StrictBool,
    StrictFloat,
    StrictInt,
    field_validator,
    model_validator,
)

from fedplat.partition_spec import Dirichlet, Partition

Fraction = Annotated[float, Field(ge=0, le=1, strict=True)]
Positive = Annotated[float, Field(gt=0, strict=True)]
Count = Annotated[int, Field(ge=1, strict=True)]


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        validate_default=True,
        use_attribute_docstrings=True,
    )


class JobSection(Section):
    """Who this is and how long it runs."""

    name: str = Field("job", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    """Name of the job; run ids start with it."""
    seed: StrictInt = Field(0, ge=0, lt=2**63)
    """Seeds partitioning, initialisation, cohorts and local shuffling. Never privacy noise."""
    rounds: Count = Field(40, le=1_000_000)
    """Number of federated rounds."""


def _no_null(arguments: dict[str, JsonValue]) -> dict[str, JsonValue]:
    """TOML has no null, so a job with one could not be written into its run directory."""
    if _holds_null(arguments):
        raise ValueError("null has no place in a job: leave the key out")
    return arguments


def _holds_null(value: JsonValue) -> bool:
    if isinstance(value, dict):
        return any(_holds_null(v) for v in value.values())
    return value is None or (isinstance(value, list) and any(_holds_null(v) for v in value))


Arguments = Annotated[dict[str, JsonValue], AfterValidator(_no_null)]


class TaskSection(Section):
    """What is learned: model, loss, metrics and data."""

    name: str = "digits"
    """A built-in task (digits, mnist, cancer) or your own as 'package.module:Class'."""
    args: Arguments = Field(default_factory=dict)
    """Arguments of the task's constructor."""
    init_from: str | None = None
    """Start from this safetensors file (transfer learning). Names that are absent keep their fresh
    initialisation."""
    init_sha256: str | None = Field(None, pattern=r"^[0-9a-f]{64}$")
    """Required SHA-256 of init_from; filled in when a run starts, so that a resume uses the same file."""
    personal: tuple[str, ...] = ()
    """Name patterns (fnmatch) of parameters and buffers that each client trains and keeps for itself (FedPer),
    e.g. ['2.*']. Needs evaluation.server = false and evaluation.clients > 0."""
    freeze: tuple[str, ...] = ()
    """Name patterns (fnmatch) of parameters that neither train nor travel, e.g. ['encoder.*']."""


class DataSection(Section):
    """Where the examples are and how they are dealt out to virtual clients."""

    dir: str | None = None
    """Directory of the task's data files; default: $FEDPLAT_DATA, else ./data."""
    holdout: StrictFloat = Field(0.0, ge=0, lt=1)
    """Share of each client's examples kept out of training for client-side evaluation."""
    partition: Partition = Dirichlet(kind="dirichlet")
    """How examples are dealt to clients: a table with `kind` and that kind's own keys."""

    @field_validator("partition", mode="before")
    @classmethod
    def _default_kind(cls, value: Any) -> Any:
        """`--set data.partition.alpha=0.1` speaks of the default kind."""
        return {"kind": "dirichlet"} | value if isinstance(value, dict) else value


class CohortSection(Section):
    """Who takes part in a round, and what happens when some of them fail."""

    clients: Count = Field(200, le=10_000_000)
    """Number of clients in the federation."""
    fraction: StrictFloat = Field(0.2, gt=0, le=1)
    """Share of the clients sampled for each round (at least one)."""
    size: Count | None = None
    """Number of clients sampled for each round; overrides fraction."""
    min_replies: Count = 1
    """Accepted updates needed to aggregate a round."""
    deadline_s: Positive = 600.0
    """Seconds until a round's missing replies count as late."""
    on_failure: Literal["continue", "retry", "stop"] = "continue"
    """A client failed, was late or was refused: carry on without it, ask it once more (before the
    deadline), or stop the run."""
    on_shortfall: Literal["stop", "skip"] = "stop"
    """Fewer than min_replies accepted: stop the run (it can be resumed), or keep the model and go on."""
    sites: tuple[str, ...] = ()
    """On a real federation, which site is client-0, client-1 …; `fedplat submit` fills it in."""

    @property
    def cohort_size(self) -> int:
        return self.size if self.size is not None else max(1, round(self.clients * self.fraction))

    @model_validator(mode="after")
    def _fits(self) -> "CohortSection":
        if self.size is not None and self.size > self.clients:
            raise ValueError(f"size {self.size} is larger than the federation: clients = {self.clients}")
        if self.min_replies > self.cohort_size:
            raise ValueError(f"min_replies {self.min_replies} can't be reached by a cohort of {self.cohort_size}")
        if self.sites and (len(self.sites) != self.clients or len(set(self.sites)) != self.clients):
            raise ValueError(f"sites must name each of the {self.clients} clients once: {', '.join(self.sites)}")
        return self


class Schedule(Section):
    """Learning rate over rounds: lr × factor(round)."""

    kind: Literal["constant", "step", "exponential", "cosine", "linear"] = "constant"
    """constant; step (× gamma every `every` rounds); exponential (× gamma each round); cosine or
    linear (down to `floor` at the last round)."""
    gamma: StrictFloat = Field(0.99, gt=0, le=1)
    """Factor of step and exponential."""
    every: Count = 10
    """Rounds between two steps of `step`."""
    floor: Fraction = 0.0
    """Last factor of cosine and linear."""
    warmup: StrictInt = Field(0, ge=0)
    """Rounds of linear warm-up from 0 before the schedule starts."""


class LocalSection(Section):
    """Training at a client."""

    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"
    """Optimiser; its state is fresh in every round."""
    lr: Positive = 0.1
    """Learning rate."""
    lr_by_client: dict[str, Positive] = Field(default_factory=dict)
    """Learning rate of single clients by name, e.g. { 'client-3' = 0.01 }."""
    schedule: Schedule = Schedule()
    """Learning-rate schedule over rounds."""
    momentum: StrictFloat = Field(0.0, ge=0, lt=1)
    """Momentum of sgd."""
    weight_decay: StrictFloat = Field(0.0, ge=0)
    """L2 penalty (sgd, adam) or decoupled decay (adamw)."""
    batch_size: Count = 16
    """Examples per batch."""
    epochs: Count | None = None
    """Limit: passes over the client's data. Give one of epochs, steps, seconds; default: 1 epoch."""
    steps: Count | None = None
    """Limit: optimiser steps."""
    seconds: Positive | None = None
    """Limit: wall time. The result then depends on the machine, so runs don't repeat bit for bit."""
    accumulate: Count = 1
    """Batches per optimiser step; the gradient is that of one batch of batch_size × accumulate."""
    clip_norm: Positive | None = None
    """Clip the gradient of each step to this L2 norm."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Autocast precision of forward and backward; weights stay as the model has them."""
    proximal_mu: StrictFloat = Field(0.0, ge=0)
    """FedProx: adds mu/2 · ‖w − w_global‖² to the loss. Strategy FedProx sets it through server.args."""
    threads: StrictInt = Field(1, ge=0)
    """Torch threads of a training client; 0 leaves torch's default. One is fastest for small models, and
    the number can change the last bits of large sums."""

    @model_validator(mode="after")
    def _one_limit(self) -> "LocalSection":
        given = [k for k in ("epochs", "steps", "seconds") if getattr(self, k) is not None]
        if len(given) > 1:
            raise ValueError(f"give one of epochs, steps, seconds (got {' and '.join(given)})")
        if self.momentum and self.optimizer != "sgd":
            raise ValueError(f"momentum belongs to sgd; {self.optimizer} has its own")
        return self


class FaultsSection(Section):
    """Faults on purpose, each with its probability per request, drawn from the job's seed."""

    fail: Fraction = 0.0
    """The client raises an error."""
    drop: Fraction = 0.0
    """The client never answers."""
    late: Fraction = 0.0
    """The client answers, but only after cohort.deadline_s."""
    nan: Fraction = 0.0
    """The client sends an update full of NaN."""
    crash: Fraction = 0.0
    """The worker process that runs the client dies (engine `process`; elsewhere the client fails)."""


class SimulationSection(Section):
    """How virtual clients run on this machine (ignored at a real site)."""

    engine: Literal["auto", "vector", "process", "serial", "ray"] = "auto"
    """vector: many clients at once in one process; process: a pool of workers; serial: one after another;
    ray: Flower's own simulation runtime; auto: measured on this job."""
    workers: StrictInt = Field(0, ge=0)
    """Worker processes of `process` and `ray`; 0 is one per core."""
    chunk: StrictInt = Field(0, ge=0)
    """Clients per batch of `vector`; 0 lets fedplat choose."""
    faults: FaultsSection = FaultsSection()
    """Faults to inject."""


class ServerSection(Section):
    """Aggregation, checks on arrival, checkpoints."""

    strategy: str = "FedAvg"
    """A strategy of flwr.serverapp.strategy, Scaffold (fedplat's own), or yours as 'package.module:Class'."""
    args: Arguments = Field(default_factory=dict)
    """Arguments of the strategy's constructor, e.g. { eta = 0.01 }. Sampling belongs to [cohort]."""
    max_update_norm: Positive = 1e4
    """An update whose L2 distance from the global model exceeds this is refused."""
    checkpoint_every: Count = 1
    """Rounds between two checkpoints (the last round is always one)."""
    keep_checkpoints: Count = 2
    """Checkpoints kept in the run directory."""


class EvaluationSection(Section):
    """Measuring, and stopping because of what was measured."""

    server: StrictBool = True
    """Evaluate the global model on the task's test split at the server."""
    every: Count = 1
    """Rounds between two evaluations (the last round is always evaluated)."""
    clients: Fraction = 0.0
    """Share of clients that evaluate the new model on their own held-out examples (needs data.holdout
    > 0)."""
    metric: str = "accuracy"
    """Metric for target, patience and the best model; 'loss' is better when lower, all others when
    higher."""
    target: StrictFloat | None = None
    """Stop as soon as the metric reaches this value."""
    patience: Count | None = None
    """Stop after this many evaluations without improvement."""
    min_delta: StrictFloat = Field(0.0, ge=0)
    """Least change that counts as an improvement."""
