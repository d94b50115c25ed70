"""A job is a value: it reads back from JSON, from TOML and from its commented file, and its digest is its identity."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedplat.cli.job_template import commented_toml
from fedplat.errors import UsageError
from fedplat.job import DEMO, Job, default_job, load_job, parse_job, validate_job
from fedplat.partition_spec import KINDS, Dirichlet, Iid, Shards

LAWS = settings(max_examples=60, deadline=None)

text = st.text(max_size=12)
positive = st.floats(min_value=1e-300, max_value=1e300)
share = st.floats(min_value=0, max_value=1)
count = st.integers(1, 10_000)
scalars = st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False) | text
# A TOML file can't say null, so jobs that come from people never hold one (see the nulls test below).
json_values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3), max_leaves=6
)
arguments = st.dictionaries(text, json_values, max_size=3)


def table(**keys: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """A section in which every key may be left out."""
    return st.fixed_dictionaries({}, optional=keys)


def kind(name: str, **keys: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({"kind": st.just(name)}, optional=keys)


partitions = {
    "iid": kind("iid"),
    "dirichlet": kind("dirichlet", alpha=positive, min_examples=count),
    "shards": kind("shards", per_client=count),
    "quantity": kind("quantity", alpha=positive, min_examples=count),
    "hash": kind("hash", salt=text),
    "range": kind("range"),
    "explicit": kind("explicit", file=text, indices=st.lists(st.lists(st.integers(0, 99), max_size=3), max_size=3)),
    "capacity": st.fixed_dictionaries(
        {"kind": st.just("capacity"), "capacities": st.lists(positive, min_size=1, max_size=4)}
    ),
}
schedules = table(
    kind=st.sampled_from(["constant", "step", "exponential", "cosine", "linear"]),
    gamma=st.floats(min_value=1e-9, max_value=1),
    every=count,
    floor=share,
    warmup=st.integers(0, 100),
)
limits = st.sampled_from([{}, {"epochs": 3}, {"steps": 7}, {"seconds": 0.25}])
local = st.builds(
    lambda section, limit: section | limit,
    table(
        optimizer=st.sampled_from(["sgd", "adam", "adamw"]),
        lr=positive,
        lr_by_client=st.dictionaries(st.integers(0, 99).map(lambda i: f"client-{i}"), positive, max_size=3),
        schedule=schedules,
        weight_decay=share,
        batch_size=count,
        accumulate=count,
        clip_norm=positive,
        precision=st.sampled_from(["fp32", "bf16", "fp16"]),
        proximal_mu=share,
        threads=st.integers(0, 64),
    ),
    limits,
)
tables = st.fixed_dictionaries(
    {},
    optional={
        "job": table(
            name=st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True),
            seed=st.integers(0, 2**63 - 1),
            rounds=count,
        ),
        "task": table(
            name=text,
            args=arguments,
            init_from=text,
            init_sha256=st.from_regex(r"[0-9a-f]{64}", fullmatch=True),
            freeze=st.lists(text, max_size=3),
        ),
        "data": table(dir=text, holdout=st.floats(0, 0.99), partition=st.one_of(*partitions.values())),
        "cohort": table(
            clients=st.integers(100, 10_000),
            fraction=st.floats(0.01, 1),
            size=st.integers(1, 100),
            deadline_s=positive,
            on_failure=st.sampled_from(["continue", "retry", "stop"]),
            on_shortfall=st.sampled_from(["stop", "skip"]),
        ),
        "local": local,
        "server": table(
            strategy=text, args=arguments.filter(lambda a: "proximal_mu" not in a), max_update_norm=positive
        ),
        "evaluation": table(every=count, metric=text, target=st.floats(-1e9, 1e9), patience=count, min_delta=share),
    },
)
jobs = tables.map(lambda content: validate_job(content, "generated"))


def test_strategy_knows_every_partitioner() -> None:
    assert set(partitions) == set(KINDS)


@LAWS
@given(jobs)
def test_job_survives_canonical_json_round_trip(job: Job) -> None:
    again = Job.from_canonical(job.canonical())
    assert again == job
    assert again.canonical() == job.canonical()
    assert again.digest == job.digest


@LAWS
@given(jobs)
def test_job_survives_toml_round_trip(job: Job) -> None:
    again = parse_job(job.to_toml())
    assert again == job
    assert again.digest == job.digest


@LAWS
@given(jobs)
def test_commented_template_parses_back_to_the_same_job(job: Job) -> None:
    again = parse_job(commented_toml(job))
    assert again == job
    assert again.digest == job.digest


@pytest.mark.parametrize("key", ["a = b", "a =", " = ", "#", "a.b", '"', "", "ключ\n"])
def test_commented_template_quotes_any_argument_name(key: str) -> None:
    job = validate_job({"task": {"args": {key: {key: 1}}}}, "test")
    assert parse_job(commented_toml(job)) == job


@pytest.mark.parametrize("args", ['{"x":null}', '{"x":[1,null]}', '{"x":{"y":null}}'])
def test_null_in_arguments_round_trips_or_is_refused(args: str) -> None:
    """TOML has no null: an argument that the run directory's job.toml would lose must not be accepted."""
    try:
        job = Job.from_canonical(f'{{"task":{{"args":{args}}}}}')
    except UsageError:
        return
    assert parse_job(job.to_toml()) == job


@given(st.sampled_from(sorted(partitions)), st.data())
@settings(max_examples=40, deadline=None)
def test_every_partitioner_survives_every_round_trip(name: str, data: st.DataObject) -> None:
    job = validate_job({"data": {"partition": data.draw(partitions[name])}}, "generated")
    assert job.data.partition.kind == name
    assert Job.from_canonical(job.canonical()) == job
    assert parse_job(job.to_toml()) == job
    assert parse_job(commented_toml(job)) == job


def test_default_job_round_trips_and_is_what_an_empty_run_config_means() -> None:
    assert Job.from_canonical("") == default_job() == load_job(None)
    assert parse_job(default_job().to_toml()) == default_job()
    assert parse_job(commented_toml(default_job())) == default_job()


def test_different_jobs_have_different_digests() -> None:
    changes = ["job.seed=1", "job.rounds=81", "local.lr=0.4", "data.partition.alpha=0.4", "task.args.hidden=64"]
    digests = {load_job(None, [change]).digest for change in changes} | {default_job().digest}
    assert len(digests) == len(changes) + 1


def test_digest_of_a_changed_copy_is_the_digest_of_its_content() -> None:
    job = default_job()
    assert len(job.digest) == 64
    changed = job.model_copy(update={"job": job.job.model_copy(update={"seed": 5})})
    assert changed.digest == Job.from_canonical(changed.canonical()).digest


def test_reading_the_digest_does_not_change_equality() -> None:
    job = default_job()
    assert job.digest
    assert job == default_job()


def test_overrides_leave_the_built_in_job_alone() -> None:
    before = default_job()
    load_job(None, ["cohort.clients=5", "cohort.fraction=1"])
    assert default_job() == before
    assert DEMO["cohort"]["clients"] == 200


@pytest.mark.parametrize(
    ("override", "section", "key", "value"),
    [
        ("cohort.fraction=0.5", "cohort", "fraction", 0.5),
        ("job.rounds=3", "job", "rounds", 3),
        (" job . rounds =3", "job", "rounds", 3),
        ("evaluation.server=false", "evaluation", "server", False),
        ("job.name=plain-text", "job", "name", "plain-text"),
        ('job.name="quoted"', "job", "name", "quoted"),
        ("task.name=package.module:Class", "task", "name", "package.module:Class"),
        ("data.dir=/some/where", "data", "dir", "/some/where"),
        ("data.dir=a=b", "data", "dir", "a=b"),
        ("data.dir=", "data", "dir", None),
        ("data.dir=données", "data", "dir", "données"),
        ("task.freeze=['encoder.*', 'x']", "task", "freeze", ("encoder.*", "x")),
        ("task.args.hidden=32", "task", "args", {"hidden": 32}),
        ("task.args={ a = 1, b = [true, 'x'] }", "task", "args", {"a": 1, "b": [True, "x"]}),
        ("task.args.deep.er=1.5", "task", "args", {"deep": {"er": 1.5}}),
        ("local.lr_by_client.client-3=0.01", "local", "lr_by_client", {"client-3": 0.01}),
        ("data.partition.alpha=0.1", "data", "partition", Dirichlet(kind="dirichlet", alpha=0.1)),
        ("data.partition.kind=iid", "data", "partition", Iid(kind="iid")),
        ("data.partition={kind='shards', per_client=3}", "data", "partition", Shards(kind="shards", per_client=3)),
    ],
)
def test_override_is_toml_or_plain_text(override: str, section: str, key: str, value: Any) -> None:
    assert getattr(getattr(load_job(None, [override]), section), key) == value


def test_overrides_apply_in_order_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text("[job]\nrounds = 7\nseed = 3\n[data.partition]\nalpha = 0.3\n", encoding="utf-8")
    job = load_job(path, ["job.rounds=8", "data.partition.min_examples=4", "job.rounds=9"])
    assert (job.job.rounds, job.job.seed) == (9, 3)
    assert job.data.partition == Dirichlet(kind="dirichlet", alpha=0.3, min_examples=4)


def test_overrides_that_only_fit_together_are_judged_together() -> None:
    job = load_job(None, ["cohort.min_replies=5", "cohort.size=5", "cohort.clients=5"])
    assert job.cohort.cohort_size == 5


@given(st.integers(1, 10_000), st.floats(min_value=1e-6, max_value=1))
@settings(max_examples=60, deadline=None)
def test_cohort_has_at_least_one_and_at_most_all_clients(clients: int, fraction: float) -> None:
    job = validate_job({"cohort": {"clients": clients, "fraction": fraction}}, "test")
    assert 1 <= job.cohort.cohort_size <= clients
    assert abs(job.cohort.cohort_size - clients * fraction) <= 1
