"""Partitioning laws, for every kind: each example goes to exactly one client, none is empty, the seed decides."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from fedplat.errors import UsageError
from fedplat.federation import FederationData, client_name, natural_order
from fedplat.job import load_job
from fedplat.partition import partition
from fedplat.partition_spec import KINDS, Partition, PartitionSpec
from fedplat.tasks import load_task

LAWS = settings(max_examples=40, deadline=None)
ADAPTER: TypeAdapter[PartitionSpec] = TypeAdapter(Partition)
RANDOM_KINDS = ("iid", "dirichlet", "shards", "quantity", "capacity")
alphas = st.floats(min_value=1e-3, max_value=1e6)


def spec(kind: str, **keys: Any) -> PartitionSpec:
    return ADAPTER.validate_json(json.dumps({"kind": kind, **keys}))


def deal(given_spec: PartitionSpec, examples: int, clients: int, seed: int = 0, **more: Any) -> list[np.ndarray]:
    return partition(given_spec, examples, clients, seed, **more)


@st.composite
def cases(draw: st.DrawFn, kind: str) -> tuple[PartitionSpec, int, int, dict[str, Any]]:
    """A specification that fits its data: (spec, examples, clients, labels and keys)."""
    clients = draw(st.integers(1, 12))
    per_client = draw(st.integers(1, 4))
    examples = draw(st.integers(clients * per_client, clients * per_client + 150))
    labels = np.array(draw(st.lists(st.integers(-3, 9), min_size=examples, max_size=examples)))
    keys = draw(st.none() | st.lists(st.text(max_size=3), min_size=examples, max_size=examples))
    owner = np.array(draw(st.permutations([*range(clients), *[i % clients for i in range(examples - clients)]])))
    options: dict[str, dict[str, Any]] = {
        "iid": {},
        "range": {},
        "dirichlet": {"alpha": draw(alphas), "min_examples": per_client},
        "quantity": {"alpha": draw(alphas), "min_examples": per_client},
        "shards": {"per_client": per_client},
        "hash": {"salt": draw(st.text(max_size=3))},
        "capacity": {"capacities": draw(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=clients))},
        "explicit": {"indices": [np.flatnonzero(owner == c).tolist() for c in range(clients)]},
    }
    return spec(kind, **options[kind]), examples, clients, {"labels": labels, "keys": keys}


@pytest.mark.parametrize("kind", KINDS)
def test_every_example_is_in_exactly_one_partition_and_no_client_is_empty(kind: str) -> None:
    @LAWS
    @given(cases(kind), st.integers(0, 2**63 - 1))
    def law(case: tuple[PartitionSpec, int, int, dict[str, Any]], seed: int) -> None:
        given_spec, examples, clients, columns = case
        try:
            parts = deal(given_spec, examples, clients, seed, **columns)
        except UsageError as refusal:
            # Only a hash can leave a client empty for want of luck; it must then say so.
            assert kind == "hash"
            assert "without examples" in str(refusal)
            assume(False)
        assert len(parts) == clients
        assert all(len(part) > 0 for part in parts)
        assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(examples))
        assert all(part.dtype == np.int64 and np.all(np.diff(part) > 0) for part in parts)

    law()


@pytest.mark.parametrize("kind", KINDS)
def test_partition_depends_only_on_specification_data_and_seed(kind: str) -> None:
    @LAWS
    @given(cases(kind), st.integers(0, 2**63 - 1))
    def law(case: tuple[PartitionSpec, int, int, dict[str, Any]], seed: int) -> None:
        given_spec, examples, clients, columns = case
        try:
            first = deal(given_spec, examples, clients, seed, **columns)
        except UsageError:
            assume(False)
        np.random.seed(1)
        np.random.random(3)
        again = deal(given_spec.model_copy(deep=True), examples, clients, seed, **columns)
        assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))

    law()


OPTIONS: dict[str, dict[str, Any]] = {"capacity": {"capacities": [1.0, 2.0]}}
LABELS = np.arange(1000) % 10


@pytest.mark.parametrize("kind", RANDOM_KINDS)
def test_different_seeds_deal_differently(kind: str) -> None:
    one, other = (deal(spec(kind, **OPTIONS.get(kind, {})), 1000, 20, seed, labels=LABELS) for seed in (0, 1))
    assert any(not np.array_equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("kind", ["range", "hash"])
def test_kinds_without_chance_ignore_the_seed(kind: str) -> None:
    one, other = (deal(spec(kind), 1000, 20, seed) for seed in (0, 1))
    assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


@LAWS
@given(st.integers(1, 20), st.integers(0, 200))
def test_iid_and_range_sizes_differ_by_at_most_one(clients: int, more: int) -> None:
    for kind in ("iid", "range"):
        sizes = [len(part) for part in deal(spec(kind), clients + more, clients)]
        assert max(sizes) - min(sizes) <= 1


@LAWS
@given(st.integers(1, 20), st.integers(0, 200))
def test_range_keeps_neighbours_together(clients: int, more: int) -> None:
    parts = deal(spec("range"), clients + more, clients)
    assert np.array_equal(np.concatenate(parts), np.arange(clients + more))


@LAWS
@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 6), st.integers(0, 2**32))
def test_clients_of_whole_label_shards_see_at_most_per_client_labels(
    per_client: int, labels: int, shards_per_label: int, seed: int
) -> None:
    shards = labels * shards_per_label * per_client  # every shard lies within one label
    column = np.random.default_rng(seed).permutation(np.repeat(np.arange(labels), 3 * shards_per_label * per_client))
    parts = deal(spec("shards", per_client=per_client), len(column), shards // per_client, seed, labels=column)
    assert all(len(np.unique(column[part])) <= per_client for part in parts)
    assert all(len(part) == 3 * per_client for part in parts)


def test_shards_that_straddle_a_label_border_add_at_most_one_label_each() -> None:
    labels = np.arange(1003) % 7
    for part in deal(spec("shards", per_client=2), 1003, 50, labels=labels):
        assert len(np.unique(labels[part])) <= 2 * 2


def label_shares(alpha: float, clients: int = 10) -> np.ndarray:
    labels = np.arange(20_000) % 10
    parts = deal(spec("dirichlet", alpha=alpha), len(labels), clients, 3, labels=labels)
    counts = np.array([np.bincount(labels[part], minlength=10) for part in parts])
    return counts / counts.sum(1, keepdims=True)


@pytest.mark.parametrize("alpha", [1e4, 1e9, 1e308])
def test_dirichlet_with_large_alpha_is_nearly_iid(alpha: float) -> None:
    assert np.abs(label_shares(alpha) - 0.1).max() < 0.02


def test_dirichlet_with_small_alpha_is_skewed() -> None:
    assert np.median(label_shares(0.01).max(1)) > 0.7


def test_dirichlet_skew_grows_as_alpha_falls() -> None:
    skews = [float(np.mean(label_shares(alpha).max(1))) for alpha in (1000.0, 1.0, 0.05)]
    assert skews == sorted(skews)


def test_dirichlet_survives_an_alpha_whose_draws_all_underflow() -> None:
    parts = deal(spec("dirichlet", alpha=1e-300), 100, 5, labels=np.arange(100) % 3)
    assert sorted(np.concatenate(parts)) == list(range(100))
    assert all(len(part) >= 2 for part in parts)


def test_quantity_skews_sizes_and_not_labels() -> None:
    labels = np.arange(20_000) % 2
    parts = deal(spec("quantity", alpha=0.3), len(labels), 10, 1)
    sizes = sorted(len(part) for part in parts)
    assert sizes[-1] > 4 * sizes[len(sizes) // 2]
    assert all(abs(labels[part].mean() - 0.5) < 0.1 for part in parts if len(part) > 500)


@pytest.mark.parametrize("alpha", [1e6, 1e308])
def test_quantity_with_large_alpha_deals_evenly(alpha: float) -> None:
    sizes = [len(part) for part in deal(spec("quantity", alpha=alpha), 1000, 10)]
    assert max(sizes) - min(sizes) <= 10


@pytest.mark.parametrize("kind", ["dirichlet", "quantity"])
@pytest.mark.parametrize("least", [1, 5, 10])
def test_min_examples_is_honoured_up_to_the_last_example(kind: str, least: int) -> None:
    labels = np.arange(100) % 4
    parts = deal(spec(kind, alpha=0.01, min_examples=least), 100, 10, 7, labels=labels)
    assert min(len(part) for part in parts) >= least


@LAWS
@given(st.lists(st.text(max_size=4), min_size=1, max_size=200), st.integers(1, 3), st.text(max_size=3))
def test_hash_sends_equal_keys_to_one_client(keys: list[str], clients: int, salt: str) -> None:
    assume(len(keys) >= clients)
    try:
        parts = deal(spec("hash", salt=salt), len(keys), clients, keys=keys)
    except UsageError:
        assume(False)
    owners: dict[str, set[int]] = {}
    for client, part in enumerate(parts):
        for row in part:
            owners.setdefault(keys[row], set()).add(client)
    assert all(len(clients_of_key) == 1 for clients_of_key in owners.values())


def test_hash_keeps_old_rows_in_place_when_rows_are_added() -> None:
    keys = [f"patient-{i}" for i in range(300)]
    before, after = deal(spec("hash"), 200, 4, keys=keys[:200]), deal(spec("hash"), 300, 4, keys=keys)
    assert all(set(old) <= set(new) for old, new in zip(before, after, strict=True))


def test_hash_salt_changes_who_gets_what() -> None:
    one, other = deal(spec("hash", salt="a"), 200, 4), deal(spec("hash", salt="b"), 200, 4)
    assert any(not np.array_equal(a, b) for a, b in zip(one, other, strict=True))


@LAWS
@given(st.lists(st.floats(1, 20), min_size=1, max_size=8), st.integers(0, 100), st.integers(0, 2**32))
def test_capacity_sizes_are_proportional_within_one(capacities: list[float], more: int, seed: int) -> None:
    examples = 50 * len(capacities) + more  # enough that every share is more than two examples
    parts = deal(spec("capacity", capacities=capacities), examples, len(capacities), seed)
    quotas = np.array(capacities) / sum(capacities) * examples
    assert np.abs(np.array([len(part) for part in parts]) - quotas).max() <= 1 + 1e-6


def test_short_capacity_list_is_repeated_over_the_clients() -> None:
    sizes = [len(part) for part in deal(spec("capacity", capacities=[1, 3]), 80, 4)]
    assert sizes == [10, 30, 10, 30]


def test_explicit_lists_may_come_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "parts.json"
    file.write_text("[[3, 0], [1, 2]]")
    assert [part.tolist() for part in deal(spec("explicit", file=str(file)), 4, 2)] == [[0, 3], [1, 2]]


BAD = {
    "more clients than examples": (spec("iid"), 3, 4, "cohort.clients = 4 but the task has only 3"),
    "too many shards": (spec("shards", per_client=3), 8, 3, "per_client = 3 makes 9 shards of 8 examples"),
    "min_examples too large": (spec("dirichlet", min_examples=5), 9, 2, "min_examples = 5 needs 10 examples"),
    "quantity too large": (spec("quantity", min_examples=5), 9, 2, "min_examples = 5 needs 10 examples"),
    "explicit: example twice": (spec("explicit", indices=[[0, 1], [1]]), 2, 2, "exactly one list"),
    "explicit: example missing": (spec("explicit", indices=[[0], [1]]), 3, 2, "every example from 0 to 2"),
    "explicit: no such example": (spec("explicit", indices=[[0], [5]]), 2, 2, "exactly one list"),
    "explicit: negative": (spec("explicit", indices=[[0], [-1]]), 2, 2, "exactly one list"),
    "explicit: far too large": (spec("explicit", indices=[[0], [2**70]]), 2, 2, "exactly one list"),
    "explicit: wrong number of lists": (spec("explicit", indices=[[0, 1]]), 2, 2, "1 lists for cohort.clients = 2"),
    "explicit: empty list": (spec("explicit", indices=[[0, 1], []]), 2, 2, "client-1"),
    "explicit: nothing given": (spec("explicit"), 2, 2, "needs indices or file"),
    "explicit: file missing": (spec("explicit", file="/no/such.json"), 2, 2, "/no/such.json"),
    "capacity: longer than the clients": (spec("capacity", capacities=[1, 2, 3]), 9, 2, "capacities"),
}


@pytest.mark.parametrize(("given_spec", "examples", "clients", "message"), BAD.values(), ids=BAD.keys())
def test_what_can_not_be_dealt_is_refused(given_spec: PartitionSpec, examples: int, clients: int, message: str) -> None:
    with pytest.raises(UsageError) as refusal:
        deal(given_spec, examples, clients, labels=np.arange(examples) % 2)
    assert message in str(refusal.value)


def test_empty_capacity_list_is_refused() -> None:
    with pytest.raises(UsageError, match="capacities"):
        deal(load_job(None, ["data.partition={kind='capacity', capacities=[]}"]).data.partition, 10, 2)


@pytest.mark.parametrize(
    "content", ["", "{", "3", '{"a": [0]}', "[0, 1]", '[["0"], [1]]', "[[0.0], [1]]", "[[0], [null]]"]
)
def test_explicit_file_that_is_no_list_of_lists_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "parts.json"
    file.write_text(content)
    with pytest.raises(UsageError, match=r"parts\.json"):
        deal(spec("explicit", file=str(file)), 2, 2)


def test_hash_that_leaves_clients_empty_names_them() -> None:
    with pytest.raises(UsageError, match=r"leaves 3 client\(s\) without examples \(client-.*lower cohort\.clients"):
        deal(spec("hash"), 50, 4, keys=["one"] * 50)


@pytest.mark.parametrize("kind", ["dirichlet", "shards"])
def test_label_skew_without_labels_says_what_to_do(kind: str) -> None:
    with pytest.raises(UsageError, match=rf"'{kind}' needs a label per example.*Examples\.labels"):
        deal(spec(kind), 10, 2)


def test_holdout_and_training_rows_share_a_client_and_nothing_else() -> None:
    job = load_job(None, ["data.holdout=0.3", "cohort.clients=20", "cohort.fraction=1"])
    data = FederationData(job, load_task(job))
    for number, name in enumerate(data.names()):
        rows = data.rows(name)
        assert len(rows.train) > 0
        assert np.array_equal(np.sort(np.concatenate([rows.train, rows.holdout])), data.parts[number])
        assert abs(len(rows.holdout) - 0.3 * len(data.parts[number])) <= 1
        assert np.array_equal(rows.holdout, data.rows(name).holdout)
        assert len(data.train(name)) == len(rows.train)
    with pytest.raises(UsageError, match="unknown client 'client-20'"):
        data.rows("client-20")


@given(st.lists(st.integers(0, 10_000), unique=True, max_size=30))
@settings(max_examples=30, deadline=None)
def test_natural_order_counts_clients_like_a_person(numbers: list[int]) -> None:
    assert natural_order([client_name(n) for n in numbers]) == [client_name(n) for n in sorted(numbers)]


def test_explicit_specification_survives_json() -> None:
    given_spec = spec("explicit", indices=[[0, 2], [1]])
    assert ADAPTER.validate_json(given_spec.model_dump_json()) == given_spec
