"""`[privacy]`: what a job may promise, and what it may not combine it with."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedplat.errors import UsageError
from fedplat.job import Job, parse_job, validate_job

SAMPLE = {"unit": "sample", "epsilon": 4.0}
CLIENT = {"unit": "client", "epsilon": 4.0}


def job_of(privacy: dict[str, object], **sections: dict[str, object]) -> Job:
    return validate_job({"privacy": privacy, **sections}, "job.toml")


BAD: dict[str, tuple[dict[str, object], dict[str, dict[str, object]], str]] = {
    "no unit": ({"epsilon": 1.0}, {}, "privacy.unit"),
    "unknown unit": ({"unit": "patient", "epsilon": 1.0}, {}, "privacy.unit"),
    "neither epsilon nor noise": ({"unit": "sample"}, {}, "give privacy.epsilon"),
    "epsilon 0": ({"unit": "sample", "epsilon": 0.0}, {}, "privacy.epsilon must be > 0"),
    "epsilon below 0": ({"unit": "sample", "epsilon": -1.0}, {}, "privacy.epsilon must be > 0"),
    "epsilon infinite": ({"unit": "sample", "epsilon": float("inf")}, {}, "privacy.epsilon"),
    "epsilon NaN": ({"unit": "sample", "epsilon": float("nan")}, {}, "privacy.epsilon"),
    "delta 0": (SAMPLE | {"delta": 0.0}, {}, "privacy.delta must be > 0"),
    "delta 1": (SAMPLE | {"delta": 1.0}, {}, "privacy.delta must be < 1"),
    "clip norm 0": (SAMPLE | {"clip_norm": 0.0}, {}, "privacy.clip_norm must be ≥ 1e-06"),
    "clip norm infinite": (SAMPLE | {"clip_norm": float("inf")}, {}, "privacy.clip_norm"),
    "noise 0": ({"unit": "sample", "noise_multiplier": 0.0}, {}, "without noise nothing is private"),
    "noise below 0": ({"unit": "sample", "noise_multiplier": -1.0}, {}, "without noise nothing is private"),
    "noise NaN": ({"unit": "sample", "noise_multiplier": float("nan")}, {}, "privacy.noise_multiplier"),
    "noise infinite": ({"unit": "sample", "noise_multiplier": float("inf")}, {}, "privacy.noise_multiplier"),
    "noise beyond all bounds": ({"unit": "sample", "noise_multiplier": 1e300}, {}, "must be at most 1e+09"),
    "next to no noise": ({"unit": "sample", "noise_multiplier": 1e-30}, {}, "must be at least 0.001"),
    "next to no noise on a count": (SAMPLE | {"adaptive": {"count_noise": 1e-9}}, {}, "privacy.adaptive.count_noise"),
    "next to no noise on metrics": (SAMPLE | {"evaluation_noise": 1e-9}, {}, "privacy.evaluation_noise"),
    "sample rate 0": (SAMPLE | {"sample_rate": 0.0}, {}, "privacy.sample_rate must be > 0"),
    "sample rate above 1": (SAMPLE | {"sample_rate": 1.1}, {}, "privacy.sample_rate must be ≤ 1"),
    "max batch 0": (SAMPLE | {"max_batch": 0}, {}, "privacy.max_batch"),
    "spare rounds below 0": (SAMPLE | {"spare_rounds": -1}, {}, "privacy.spare_rounds"),
    "an accountant that is banned": (SAMPLE | {"accountant": "gdp"}, {}, "privacy.accountant"),
    "quantile 1": (SAMPLE | {"adaptive": {"quantile": 1.0}}, {}, "privacy.adaptive.quantile"),
    "count noise 0": (SAMPLE | {"adaptive": {"count_noise": 0.0}}, {}, "privacy.adaptive.count_noise"),
    "unknown key": (SAMPLE | {"epsilom": 1.0}, {}, "did you mean"),
    "sample rate of clients": (CLIENT | {"sample_rate": 0.1}, {}, "privacy.sample_rate is for unit sample"),
    "max batch of clients": (CLIENT | {"max_batch": 10}, {}, "privacy.max_batch is for unit sample"),
    "participations of clients": (CLIENT | {"participations": 3}, {}, "privacy.participations is for unit sample"),
    "separation of samples": (SAMPLE | {"min_separation": 3}, {}, "privacy.min_separation is for unit client"),
    "cohort sampling of samples": (SAMPLE | {"sampling": "none"}, {}, "is for unit client"),
    "banded without separation": (CLIENT | {"sampling": "banded"}, {}, "belong together"),
    "separation without bands": (CLIENT | {"min_separation": 3}, {}, "belong together"),
    "banded and adaptive": (
        CLIENT | {"sampling": "banded", "min_separation": 3, "adaptive": {}}, {}, "not with sampling = 'banded'"),
    "a time limit": (SAMPLE, {"local": {"seconds": 1.0}}, "local.seconds"),
    "a time limit for clients": (CLIENT, {"local": {"seconds": 1.0}}, "local.seconds"),
    "half precision": (SAMPLE, {"local": {"precision": "bf16"}}, "local.precision = 'bf16'"),
    "another clip norm": (SAMPLE, {"local": {"clip_norm": 1.0}}, "set privacy.clip_norm"),
    "metrics without noise": (
        SAMPLE, {"evaluation": {"clients": 0.5}, "data": {"holdout": 0.2}}, "privacy.evaluation_noise"),
    "metrics of clients": (
        CLIENT | {"evaluation_noise": 1.0}, {"evaluation": {"clients": 0.5}, "data": {"holdout": 0.2}},
        "can't pay for evaluation.clients"),
    "scaffold for clients": (CLIENT, {"server": {"strategy": "Scaffold"}}, "not SCAFFOLD"),
}  # fmt: skip


@pytest.mark.parametrize(("privacy", "sections", "message"), BAD.values(), ids=BAD.keys())
def test_a_promise_that_can_not_be_kept_is_refused_by_its_key(privacy, sections, message):
    with pytest.raises(UsageError) as refused:
        job_of(privacy, **sections)
    assert message in str(refused.value)


def test_a_job_without_the_section_promises_nothing():
    job = validate_job({}, "job.toml")
    assert job.privacy is None and "privacy" not in job.to_toml()


RELATIONS = {
    "add-remove": [SAMPLE, CLIENT, CLIENT | {"sampling": "none"}, CLIENT | {"sampling": "banded", "min_separation": 2}],
    "zero-out": [SAMPLE | {"max_batch": 100}],
    "replace-one": [CLIENT | {"sampling": "fixed"}],
}


@pytest.mark.parametrize(("relation", "privacy"), [(r, p) for r, sections in RELATIONS.items() for p in sections])
def test_the_neighbours_follow_from_how_batches_and_cohorts_are_drawn(relation, privacy):
    assert job_of(privacy).privacy.relation == relation


def test_insecure_noise_and_conversion_are_never_a_default():
    section = job_of(SAMPLE).privacy
    assert not section.insecure_noise and not section.convert_model and section.accountant == "pld"


@given(
    epsilon=st.floats(1e-3, 1e3),
    delta=st.floats(1e-12, 0.5),
    clip_norm=st.floats(1e-6, 1e6),
    sample_rate=st.one_of(st.none(), st.floats(1e-6, 1.0)),
    adaptive=st.one_of(st.none(), st.fixed_dictionaries({"quantile": st.floats(0.01, 0.99)})),
    max_batch=st.one_of(st.none(), st.integers(1, 10**6)),
)
def test_the_section_survives_its_file_and_its_journey(**privacy):
    job = job_of({"unit": "sample"} | {key: value for key, value in privacy.items() if value is not None})
    assert parse_job(job.to_toml()) == job
    assert Job.from_canonical(job.canonical()) == job
    assert parse_job(job.to_toml()).digest == job.digest


def test_what_is_promised_is_part_of_the_jobs_identity():
    digests = {job_of(SAMPLE | change).digest for change in ({}, {"delta": 1e-6}, {"clip_norm": 2.0}, {"max_batch": 9})}
    assert len(digests) == 4
