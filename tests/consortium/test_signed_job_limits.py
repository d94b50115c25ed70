"""A run's job comes from whoever can start runs: reading it costs little, whatever it is."""

import json
import time

import pytest

from fedplat.consortium import signed_job
from fedplat.consortium.identity import SigningKey
from fedplat.consortium.signed_job import LARGEST_JOB, SignedJob
from fedplat.errors import UsageError
from fedplat.job import load_job

DEEP = ["[" * 100_000, '{"job":' * 100_000, '{"job":"x","signed_at":' + "[" * 50_000]


@pytest.mark.parametrize("text", DEEP, ids=lambda text: text[:9])
def test_nesting_is_refused_in_words(text):
    with pytest.raises(UsageError, match="carries no signed job"):
        SignedJob.parse(text)


def test_a_job_over_the_limit_is_not_even_read(monkeypatch):
    signed = SignedJob.sign(load_job(None, []), "alpha", "olga", SigningKey.generate(), time.time()).text()
    assert SignedJob.parse(signed + " " * (LARGEST_JOB - len(signed))).operator == "olga"
    monkeypatch.setattr(signed_job.canonical, "loads", lambda text: pytest.fail("was read"))
    for text in (signed + " " * LARGEST_JOB, json.dumps({"job": "x" * LARGEST_JOB})):
        with pytest.raises(UsageError, match="carries no signed job"):
            SignedJob.parse(text)
