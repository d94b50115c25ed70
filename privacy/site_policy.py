"""What a site demands of jobs beyond its budgets: `[policy]` in the site's own file.

Every rule has a name, which a refusal quotes. Nothing that a server or an operator sends can loosen one.
"""

from datetime import datetime
from typing import Annotated

from pydantic import AfterValidator, Field, StrictBool, StrictFloat, StrictInt

from fedplat.errors import UsageError
from fedplat.job_sections import Section

HOURS = r"^([01]\d|2[0-3]):[0-5]\d-([01]\d|2[0-3]):[0-5]\d$"
POLICY_TEMPLATE = """\

[policy]                          # rules for jobs that come over the network; a refusal names the rule
# signers = ["alice"]             # operators whose jobs are served; default: every operator in the roster
# min_cohort = 2                  # fewest sites that a round's mean must be taken over
# max_rounds = 1000               # most rounds of one job
# max_evaluations = 100           # most evaluations of one job without [privacy]; 0: none
# max_epsilon_per_job = 2.0       # a private job must claim no more, whatever the budget would allow
# min_noise_multiplier = 0.5      # a private job must add at least this much noise
# require_secure_aggregation = false
# max_steps = 100000              # most local steps of one round: noise makes them cheap in ε, not in time
# max_seconds = 3600.0            # computing time of one request
# max_job_age_days = 30.0         # since it was signed
# hours = "20:00-06:00"           # local time in which work is begun
# show_budget = false             # tell the server what is left of each budget
# witnesses = 0                   # other sites that must have confirmed this site's ledger since the agent started
"""


class PolicyRefusal(UsageError):
    """What a site's own rule forbids."""

    def __init__(self, rule: str, message: str) -> None:
        super().__init__(f"policy.{rule}: {message}")
        self.rule = rule


def _whole_day(value: str) -> str:
    start, _, end = value.partition("-")
    if start == end:
        raise ValueError("hours begin and end at the same minute: leave the rule out to allow the whole day")
    return value


class PolicySection(Section):
    """Rules for jobs that come over the network."""

    signers: tuple[str, ...] | None = None
    """Operators whose jobs are served; None: every operator in the roster."""
    min_cohort: StrictInt = Field(1, ge=1)
    """Fewest sites that a round's mean must be taken over."""
    max_rounds: StrictInt | None = Field(None, ge=1)
    """Most rounds of one job."""
    max_evaluations: StrictInt = Field(100, ge=0)
    """Most evaluations of one job without [privacy]."""
    max_epsilon_per_job: StrictFloat | None = Field(None, gt=0)
    """A private job must claim no more."""
    min_noise_multiplier: StrictFloat | None = Field(None, gt=0)
    """A private job must add at least this much noise."""
    require_secure_aggregation: StrictBool = False
    """Refuse jobs whose updates the server would see one by one."""
    max_steps: StrictInt = Field(100_000, ge=1)
    """Most local steps of one round, also on plain Flower: noise makes steps cheap in ε, not in time."""
    max_seconds: StrictFloat = Field(3600.0, gt=0)
    """Computing time of one request."""
    max_job_age_days: StrictFloat = Field(30.0, gt=0)
    """Since the job was signed."""
    hours: Annotated[str, Field(pattern=HOURS), AfterValidator(_whole_day)] | None = None
    """Local time in which work is begun, such as 20:00-06:00."""
    show_budget: StrictBool = False
    """Tell the server what is left of each budget."""
    witnesses: StrictInt = Field(0, ge=0)
    """Other sites that must have confirmed this site's ledger since the agent started."""

    def is_open(self, now: datetime) -> bool:
        """May work be begun at this local time?"""
        if self.hours is None:
            return True
        start, end = self.hours.split("-")
        clock = now.strftime("%H:%M")
        return start <= clock < end if start < end else clock >= start or clock < end
