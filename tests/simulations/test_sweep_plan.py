"""A sweep is the product of its axes and seeds, under safe and unique names; a wrong grid is explained."""

import itertools
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedplat.errors import JobError, UsageError
from fedplat.job import Job
from simulations.sweep_plan import (
    Axis,
    check_points,
    parse_axis,
    plan_points,
    setting_names,
    settings,
    split_values,
)


def test_points_are_the_product_of_axes_and_seeds(spec):
    points = plan_points(spec(seeds=3, job__seed=7))
    found = [(p.job.local.lr, p.job.server.strategy, p.job.job.seed) for p in points]
    assert found == list(itertools.product((0.1, 0.4), ("FedAvg", "FedAdam"), (7, 8, 9)))
    assert points[0].name == "local.lr=0.1,server.strategy=FedAvg,seed=7"


def test_seeds_alone_are_a_sweep_and_nothing_is_not(spec):
    assert [p.name for p in plan_points(spec(grid=(), seeds=2))] == ["seed=0", "seed=1"]
    with pytest.raises(UsageError, match="nothing varies"):
        plan_points(spec(grid=(), seeds=1))


@pytest.mark.parametrize(
    ("raw", "items"),
    {
        "0.1,0.2": ["0.1", "0.2"],
        "[1,2],[3]": ["[1,2]", "[3]"],
        "{kind='iid'},{kind='shards',per_client=2}": ["{kind='iid'}", "{kind='shards',per_client=2}"],
        '\'a,b\',"c\\",d",e': ["'a,b'", '"c\\",d"', "e"],
        "{a=']},'},x": ["{a=']},'}", "x"],
        "don't,won't": ["don't", "won't"],
        "one": ["one"],
    }.items(),
)
def test_commas_in_brackets_and_quotes_do_not_split(raw, items):
    assert split_values(raw) == items


@given(st.lists(st.lists(st.text(st.characters(codec="ascii", exclude_characters="\\"))), min_size=1, max_size=4))
def test_lists_of_any_text_survive_splitting(values):
    raw = ",".join(json.dumps(value) for value in values)
    assert [json.loads(item) for item in split_values(raw)] == values


def test_values_are_toml_or_plain_text():
    assert parse_axis(" a.b = 1, 2.5,true ,FedAvg,'x,y',[1, 2]") == Axis("a.b", (1, 2.5, True, "FedAvg", "x,y", [1, 2]))


def test_an_axis_over_a_kind_does_not_meet_the_default_keys_of_another(spec):
    points = plan_points(spec(grid=("data.partition.kind=iid,shards,dirichlet",), seeds=1))
    assert [p.job.data.partition.kind for p in points] == ["iid", "shards", "dirichlet"]


def test_a_section_varies_its_keys_together_and_keeps_the_others(spec):
    grid = ("server={strategy='FedAvg'},{strategy='FedAdam',args={eta=0.05}}",)
    points = plan_points(spec(grid=grid, seeds=1, server__max_update_norm=5.0))
    assert [p.name for p in points] == ["server.strategy=FedAvg,seed=0", "server.strategy=FedAdam+args.eta=0.05,seed=0"]
    assert points[1].job.server.args == {"eta": 0.05}
    assert all(p.job.server.max_update_norm == 5.0 for p in points)


scalars = st.one_of(st.integers(), st.floats(), st.booleans(), st.text(max_size=150), st.dates())
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3), max_leaves=4
)
axis_values = st.lists(values, min_size=1, max_size=4, unique_by=repr).map(tuple)
AXES = st.lists(st.builds(Axis, st.sampled_from(["local.lr", "task.args.näme", "data.partition"]), axis_values),
                max_size=3, unique_by=lambda axis: axis.key)  # fmt: skip


@given(AXES)
def test_names_are_unique_and_safe(axes):
    names = setting_names(axes)
    assert len(names) == len(list(settings(axes))) == len({name.casefold() for name in names})
    assert all(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+=,~-]*", name) and len(name) <= 100 for name in names)


WRONG = {
    "no value": (("local.lr",), "write section.key=value,value"),
    "an empty value": (("local.lr=0.1,,0.2",), "a value is missing"),
    "an unclosed bracket": (("data.partition={kind='iid',{kind='shards'}",), "not valid TOML"),
    "a value twice": (("local.lr=0.1,0.10",), "a value is given twice"),
    "a key twice": (("local.lr=0.1", "local.lr=0.2"), "local.lr is given twice"),
    "a section without a table": (("local=3",), "'local' is a section"),
    "a value as a section": (("job.name.x=1,2",), "'name' is a value, not a section"),
    "an unknown key": (("local.lrr=1,2",), "did you mean 'local.lr'"),
    "a bad last value": (("local.lr=0.1,-1",), r"sweep point local.lr=-1,seed=0: local.lr must be > 0"),
    "the seed": (("job.seed=1,2",), "use --set job.seed=FIRST and --seeds"),
    "the metric": (("evaluation.metric=accuracy,loss",), "one metric compares all points"),
    "the same job twice": (("local.lr=1,1.0",), "are the same job"),
}


@pytest.mark.parametrize(("grid", "message"), WRONG.values(), ids=WRONG.keys())
def test_a_wrong_grid_is_explained(grid, message, spec):
    with pytest.raises(UsageError, match=message):
        plan_points(spec(grid=grid))


def test_every_point_is_prepared_before_the_first_runs(spec):
    def refuse_adam(job: Job) -> Job:
        if job.server.strategy == "FedAdam":
            raise JobError("no Adam here")
        return job.model_copy(update={"job": job.job.model_copy(update={"name": "ready"})})

    points = plan_points(spec(grid=("local.lr=0.1,0.4",)))
    assert {p.job.job.name for p in check_points(points, refuse_adam)} == {"ready"}
    with pytest.raises(UsageError, match=r"local\.lr=0\.1,server\.strategy=FedAdam,seed=0: no Adam here"):
        check_points(plan_points(spec()), refuse_adam)
