"""A run carries a signed job, not code: canonical JSON of the job, and an operator's signature over it.

Everything that decides what a site computes is inside the signature, and when it was signed. A job's identity is its
digest alone, so the same job submitted again, or replayed by somebody, earns nothing but the replies that were cached.
"""

from pydantic import BaseModel, ConfigDict, ValidationError

from fedplat import canonical
from fedplat.consortium.identity import SigningKey, is_signed
from fedplat.consortium.roster import PartyName, Roster
from fedplat.errors import UsageError
from fedplat.job import Job

PURPOSE = "job"
LARGEST_JOB = 1 << 20
"""Characters. Nobody's job is nearly as long."""


class SignedJob(BaseModel):
    """What the run config carries under `job`."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    job: str
    """Canonical JSON of the job."""
    consortium: PartyName
    operator: PartyName
    signed_at: float
    """Seconds since the epoch; a site refuses a job that was signed too long ago or in its future."""
    signature: str

    @classmethod
    def sign(cls, job: Job, consortium: str, operator: str, key: SigningKey, signed_at: float) -> "SignedJob":
        body = {"job": job.canonical(), "consortium": consortium, "operator": operator, "signed_at": signed_at}
        return cls.model_validate(body | {"signature": key.sign(PURPOSE, body)})

    @classmethod
    def parse(cls, text: str) -> "SignedJob":
        try:
            if len(text) > LARGEST_JOB:
                raise ValueError("too long")
            return cls.model_validate(canonical.loads(text))
        except (ValueError, ValidationError, RecursionError):
            raise UsageError("this run carries no signed job. Submit it with: fedplat submit job.toml") from None

    def text(self) -> str:
        return self.model_dump_json()

    def verified(self, roster: Roster) -> Job:
        """The job, if an operator of this consortium signed it."""
        if self.consortium != roster.consortium:
            raise UsageError(f"the job was signed for consortium '{self.consortium}', this is '{roster.consortium}'")
        operator = roster.operators.get(self.operator)
        if operator is None:
            raise UsageError(f"'{self.operator}' is no operator of this consortium (any more)")
        body = self.model_dump(exclude={"signature"})
        if not is_signed(operator.identity, self.signature, PURPOSE, body):
            raise UsageError(f"the job's signature is not operator '{self.operator}''s")
        job = Job.from_canonical(self.job)
        if job.canonical() != self.job:  # else this installation's defaults would decide, which nobody signed
            raise UsageError("the signed job is not written out in full, as this version writes it. Submit it again")
        return job
