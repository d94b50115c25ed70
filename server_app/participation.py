"""How often one client will be asked, known in advance: cohorts follow from the job's seed."""

import numpy as np

from fedplat.federation import client_name
from fedplat.job import Job
from server_app.cohort import sample_cohort

MOST_DRAWS = 50_000_000
"""Beyond this many (round, client) draws the count isn't worth its time: every round is assumed."""


def most_participations(job: Job) -> int:
    """The most rounds that one client is in the cohort of; what per-example privacy has to cover."""
    rounds, clients, size = job.job.rounds, job.cohort.clients, job.cohort.cohort_size
    if size == clients or rounds * clients > MOST_DRAWS:
        return rounds
    names = [client_name(i) for i in range(clients)]
    position = {name: i for i, name in enumerate(names)}
    asked = np.zeros(clients, np.int64)
    for number in range(1, rounds + 1):
        for name in sample_cohort(names, size, job.job.seed, "cohort", number):
            asked[position[name]] += 1
    return int(asked.max())
