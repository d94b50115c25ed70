"""Learning rate of a client in a round: its own base rate times the job's schedule."""

import math

from fedplat.job import Job
from fedplat.job_sections import Schedule


def learning_rate(job: Job, client: str, round_number: int) -> float:
    base = job.local.lr_by_client.get(client, job.local.lr)
    return base * schedule_factor(job.local.schedule, round_number, job.job.rounds)


def schedule_factor(schedule: Schedule, round_number: int, rounds: int) -> float:
    """The factor in round 1 … rounds; 1.0 in the first round after warm-up."""
    if round_number <= schedule.warmup:
        return round_number / (schedule.warmup + 1)
    elapsed = round_number - schedule.warmup - 1
    progress = elapsed / max(1, rounds - schedule.warmup - 1)
    match schedule.kind:
        case "constant":
            return 1.0
        case "step":
            return float(schedule.gamma ** (elapsed // schedule.every))
        case "exponential":
            return float(schedule.gamma**elapsed)
        case "linear":
            return 1.0 - (1.0 - schedule.floor) * progress
        case "cosine":
            return schedule.floor + (1.0 - schedule.floor) * (1 + math.cos(math.pi * progress)) / 2
