"""The job file: one TOML file that says everything about a run, and the value it becomes.

    job = load_job(Path("job.toml"), overrides=["cohort.fraction=0.2"])
    Job.from_canonical(job.canonical()) == job          # it travels through Flower as one string
    parse_job(job.to_toml()) == job                     # and is written into every run directory

Unknown keys, wrong types and values out of range are `UsageError`s that name the key.
"""

import copy
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import ValidationError, model_validator

from fedplat import canonical
from fedplat.errors import UsageError
from fedplat.job_errors import describe_errors
from fedplat.job_sections import (
    CohortSection,
    DataSection,
    EvaluationSection,
    JobSection,
    LocalSection,
    Section,
    ServerSection,
    SimulationSection,
    TaskSection,
)
from fedplat.privacy_section import PrivacySection


class Job(Section):
    """A federated training job."""

    job: JobSection = JobSection()
    task: TaskSection = TaskSection()
    data: DataSection = DataSection()
    cohort: CohortSection = CohortSection()
    local: LocalSection = LocalSection()
    server: ServerSection = ServerSection()
    evaluation: EvaluationSection = EvaluationSection()
    simulation: SimulationSection = SimulationSection()
    privacy: PrivacySection | None = None

    @model_validator(mode="after")
    def _consistent(self) -> "Job":
        if self.evaluation.clients > 0 and self.data.holdout == 0:
            raise ValueError("evaluation.clients needs data.holdout > 0: clients evaluate on held-out examples")
        if (self.evaluation.target is not None or self.evaluation.patience) and not self.evaluation.server:
            raise ValueError("evaluation.target and evaluation.patience need evaluation.server = true")
        strategy_mu = self.server.args.get("proximal_mu")
        if strategy_mu is not None and self.local.proximal_mu not in (0.0, strategy_mu):
            raise ValueError("local.proximal_mu and server.args.proximal_mu differ: give one of them")
        self._check_client_state()
        self._check_privacy()
        known = {f"client-{i}" for i in range(self.cohort.clients)} if self.local.lr_by_client else set()
        for name in self.local.lr_by_client:
            if name not in known:
                raise ValueError(f"local.lr_by_client: no client '{name}': they are client-0 … client-{len(known) - 1}")
        self.canonical()  # refuses what has no JSON form (NaN in task.args)
        return self

    def _check_client_state(self) -> None:
        if self.task.personal and (self.evaluation.server or self.evaluation.clients == 0):
            raise ValueError(
                "task.personal needs evaluation.server = false and evaluation.clients > 0 (with data.holdout > 0): "
                "the server's copy of personal layers is never trained, so the model is judged at the clients"
            )
        if self.is_scaffold and (self.local.optimizer != "sgd" or self.local.momentum):
            raise ValueError(
                "server.strategy = 'Scaffold' needs local.optimizer = 'sgd' and local.momentum = 0: it measures a "
                "client's gradient as (x − y) / (K · lr), which holds only for plain steps"
            )

    def _check_privacy(self) -> None:
        """What a private job can't have: each would be a release that no accountant sees, or a wrong sensitivity."""
        if self.privacy is None:
            return
        local, unit = self.local, self.privacy.unit
        if local.seconds is not None:
            raise ValueError("local.seconds under [privacy]: the number of steps would depend on the data. Use steps")
        if unit == "sample" and local.clip_norm is not None:
            raise ValueError("local.clip_norm under [privacy]: set privacy.clip_norm, which bounds every example")
        if unit == "sample" and local.precision != "fp32":
            raise ValueError(f"local.precision = '{local.precision}' under [privacy]: norms need fp32")
        if self.evaluation.clients > 0 and self.privacy.evaluation_noise is None:
            raise ValueError(
                "evaluation.clients under [privacy]: a client's metrics are a release too. Set "
                "privacy.evaluation_noise to pay for them, or evaluation.clients = 0"
            )
        if unit == "client" and self.evaluation.clients > 0:
            raise ValueError("privacy.unit = 'client' can't pay for evaluation.clients: set it to 0")
        if unit == "client" and self.uses_client_state:
            raise ValueError("privacy.unit = 'client' covers one clipped update: not SCAFFOLD, not task.personal")

    @property
    def is_scaffold(self) -> bool:
        """Control variates travel beside the model (`server_app/scaffold.py`, `client_app/scaffold.py`)."""
        return self.server.strategy == "Scaffold"

    @property
    def uses_client_state(self) -> bool:
        """Clients keep something between rounds: personal layers or control variates."""
        return bool(self.task.personal) or self.is_scaffold

    @property
    def proximal_mu(self) -> float:
        """The proximal weight, from [local] or from the arguments of strategy FedProx."""
        strategy_mu = self.server.args.get("proximal_mu")
        return float(strategy_mu) if isinstance(strategy_mu, int | float) else self.local.proximal_mu

    def canonical(self) -> str:
        """The job as canonical JSON: what travels through Flower and what is signed."""
        return canonical.dumps(self.model_dump(mode="json"))

    @property
    def digest(self) -> str:
        """SHA-256 of the canonical JSON: the identity of the job."""
        return canonical.digest(self.model_dump(mode="json"))

    @classmethod
    def from_canonical(cls, text: str) -> "Job":
        """The job that `canonical` wrote; an empty run-config key stands for the built-in default job."""
        if not text:
            return default_job()
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            raise UsageError(f"job: {describe_errors(error, cls)}") from None

    def to_toml(self) -> str:
        """The resolved job with every default written out (TOML has no null: unset keys are left out)."""
        return tomli_w.dumps(_without_none(self.model_dump(mode="json")))


DEMO: dict[str, dict[str, Any]] = {
    "job": {"name": "digits-demo", "rounds": 80},
    "task": {"name": "digits"},
    "cohort": {"clients": 200, "fraction": 0.2},
    "local": {"epochs": 5, "batch_size": 8, "lr": 0.5},
}
"""The built-in default job: 200 non-IID clients learn handwritten digits."""


def default_job() -> Job:
    return validate_job(DEMO, "the built-in default job")


def load_job(path: Path | None, overrides: Sequence[str] = ()) -> Job:
    """Read a job file (or take the built-in default job), apply `--set` overrides, validate."""
    table = copy.deepcopy(DEMO) if path is None else _read_toml(path)
    source = "--set" if path is None else str(path)
    for override in overrides:
        _apply_override(table, override)
    return validate_job(table, source)


def parse_job(text: str, source: str = "job.toml") -> Job:
    try:
        return validate_job(tomllib.loads(text), source)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{source}: not valid TOML: {error}") from None


def validate_job(table: Mapping[str, Any], source: str) -> Job:
    try:
        return Job.model_validate(table)
    except ValidationError as error:
        raise UsageError(f"{source}: {describe_errors(error, Job)}") from None


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"{path}: no such job file. Write one with: fedplat job init {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: can't be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path}: not valid TOML: {error}") from None


def _apply_override(table: dict[str, Any], override: str) -> None:
    """Apply one `section.key=value`; the value is TOML, or plain text where it is not valid TOML."""
    key, equals, raw = override.partition("=")
    parts = [part.strip() for part in key.split(".")]
    if not equals or len(parts) < 2 or not all(parts):
        raise UsageError(f"--set {override}: write section.key=value, for example --set cohort.fraction=0.2")
    try:
        parsed = tomllib.loads(f"value = {raw}")
        value = parsed["value"] if len(parsed) == 1 else raw
    except tomllib.TOMLDecodeError:
        value = raw.strip()
    for part in parts[:-1]:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise UsageError(f"--set {override}: '{part}' is a value, not a section")
    _make_way(table, parts, value)
    if raw.strip():
        table[parts[-1]] = value
    else:  # `--set local.clip_norm=` takes a key away
        table.pop(parts[-1], None)


def _make_way(table: dict[str, Any], parts: list[str], value: Any) -> None:
    """An override replaces a choice: another limit ends the old one, another partition has its own keys."""
    limits = {"epochs", "steps", "seconds"}
    if parts[0] == "local" and parts[1] in limits:
        for other in limits - {parts[1]}:
            table.pop(other, None)
    if parts == ["data", "partition", "kind"] and table.get("kind", "dirichlet") != value:
        table.clear()


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_none(v) for k, v in value.items() if v is not None}
    return value
