"""What a server may ask: requests as strategies make them pass, any other value anywhere is refused, in words."""

import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_object_tree, iterate_object_tree
from hypothesis import given, settings
from hypothesis import strategies as st

from client_app.handler import Handler
from client_app.requests import most_objects, read_request, request_digest
from fedplat import wire
from fedplat.errors import UsageError
from fedplat.flower import SERVER_NODE_ID, become_server
from fedplat.job import Job, validate_job
from fedplat.tasks import load_task
from fedplat.wire import Identity
from server_app.adaptive_clip import send_clip_norm, without_clip_norm
from server_app.evaluation import GlobalModel
from server_app.strategies import MEAN_BASED, build_strategy
from simulations.local_grid import LocalGrid
from tests.server_app.test_driver import client_app
from tests.server_app.test_strategies import ARGUMENTS

EXPECTED = {"w": ("float32", (2, 3)), "b": ("float32", (3,)), "n": ("int64", ())}
LAWS = settings(max_examples=60, deadline=None)


def job_of(**server: object) -> Job:
    table: dict[str, object] = {
        "job": {"rounds": 5},
        "task": {"args": {"hidden": 8}},
        "cohort": {"clients": 2, "fraction": 1.0, "on_failure": "retry"},
        "evaluation": {"clients": 1.0},
        "data": {"holdout": 0.2},
    }
    return validate_job(table | {"server": server}, "test")


JOB = job_of(strategy="FedProx", args={"proximal_mu": 0.25})
OTHER = job_of(strategy="FedAvg")


def model(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: np.asarray(rng.normal(size=shape) * 9).astype(dtype) for name, (dtype, shape) in EXPECTED.items()}


def honest(number: int = 2, attempt: int = 1, seed: int = 0) -> RecordDict:
    config = Identity(JOB.digest, number, attempt).record()
    config["server-round"], config["proximal-mu"] = number, 0.25
    content = RecordDict({wire.CONFIG: config, wire.ARRAYS: wire.encode_arrays(model(seed))})
    content[wire.PEERS] = ConfigRecord({"statements": ["{}"], "roster": "{}"})
    return content


def message(content: RecordDict, kind: str = "train") -> Message:
    become_server(7)
    return Message(content, dst_node_id=9, message_type=kind)


def read(content: RecordDict, kind: str = "train") -> tuple[Identity, str]:
    return read_request(message(content, kind), JOB, "client-1", EXPECTED)


# --- honest requests -----------------------------------------------------------------------------


def asked(job: Job, train: bool) -> list[Message]:
    """The messages that the driver sends for a round, made by the job's own strategy."""
    strategy, grid = build_strategy(job), LocalGrid(client_app(), job.cohort.clients, {})
    initial = GlobalModel(job, load_task(job)).initial
    configure = strategy.configure_train if train else strategy.configure_evaluate
    config = Identity(job.digest, 3, 1).record()
    requests = list(configure(3, wire.encode_arrays(without_clip_norm(initial)), config, grid))
    send_clip_norm(requests, initial)
    return requests


@pytest.mark.parametrize("train", [True, False], ids=["train", "evaluate"])
@pytest.mark.parametrize("name", sorted(MEAN_BASED))
def test_what_a_strategy_sends_is_accepted(name, train):
    args: dict[str, Any] = dict(ARGUMENTS.get(name, {}))
    job = job_of(strategy=name, args=args)
    expected = Handler(job).expected()
    requests = asked(job, train)
    assert requests
    for request in requests:
        assert read_request(request, job, "client-1", expected)[0] == Identity(job.digest, 3, 1, "client-1")


def test_a_whole_number_for_mu_is_the_same_mu():
    job = job_of(strategy="FedProx", args={"proximal_mu": 1})
    for request in asked(job, train=True):
        read_request(request, job, "client-0", Handler(job).expected())


def test_what_the_job_did_not_plan_is_refused():
    """An evaluation in a round without one, a repetition in a job that repeats nothing."""
    with pytest.raises(UsageError, match="repeats no requests"):
        read(honest(attempt=2), "evaluate")
    job = OTHER.model_copy(update={"evaluation": OTHER.evaluation.model_copy(update={"every": 2})})
    expected = Handler(job).expected()
    for number, planned in ((1, False), (2, True), (3, False), (5, True)):
        content = RecordDict({wire.CONFIG: Identity(job.digest, number, 1).record()})
        content[wire.ARRAYS] = wire.encode_arrays({n: np.zeros(s, d) for n, (d, s) in expected.items()})
        if planned:
            read_request(message(content, "evaluate"), job, "client-0", expected)
        else:
            with pytest.raises(UsageError, match="has no evaluation at clients then"):
                read_request(message(content, "evaluate"), job, "client-0", expected)


def test_an_adaptive_clip_norm_travels_along(tiny_job):
    privacy = {"unit": "sample", "noise_multiplier": 2.0, "sample_rate": 0.2, "adaptive": {}, "evaluation_noise": 5.0}
    job = tiny_job(
        evaluation__clients=1.0, data__holdout=0.2, **{f"privacy__{key}": value for key, value in privacy.items()}
    )
    expected = Handler(job).expected()
    assert wire.CLIP_NORM in expected
    for request in asked(job, train=True) + asked(job, train=False):
        read_request(request, job, "client-0", expected)


def test_the_identity_is_the_requests_under_the_sites_own_name():
    identity, _ = read(honest(4, 2))
    assert identity == Identity(JOB.digest, 4, 2, "client-1")


# --- every other request ---------------------------------------------------------------------------

scalars = st.one_of(
    st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(), st.text(max_size=5), st.binary(max_size=5)
)
values = scalars | st.lists(st.integers(-5, 5), max_size=2) | st.lists(st.floats(), max_size=2)
KNOWN = ("job", "round", "attempt", "client", "server-round", "proximal-mu")


def same(before: object, after: object) -> bool:
    """A whole number is the same as a float or not, but never the same as a truth value."""
    return before == after and not isinstance(after, bool)


@LAWS
@given(st.sampled_from(KNOWN), values)
def test_any_other_value_of_a_known_key_is_refused(key, value):
    content = honest()
    if same(content[wire.CONFIG][key], value) or (key in ("round", "attempt", "server-round") and value in (1, 2)):
        return
    content[wire.CONFIG][key] = value
    with pytest.raises(UsageError):
        read(content)


@pytest.mark.parametrize("key", ["round", "attempt", "server-round"])
@pytest.mark.parametrize("value", [True, False, -1, 0, 3, 6, 2**62])
def test_numbers_that_a_job_has_not_are_refused(key, value):
    content = honest(1, 1)
    content[wire.CONFIG][key] = value
    if key == "round" and value == 3:
        content[wire.CONFIG]["server-round"] = 4  # else it is an honest request for round 3
    with pytest.raises(UsageError):
        read(content)


@LAWS
@given(st.text(max_size=12).filter(lambda key: key not in KNOWN), values)
def test_a_key_that_no_request_has_is_refused(key, value):
    content = honest()
    content[wire.CONFIG][key] = value
    with pytest.raises(UsageError, match="hyper-parameters come from the signed job only"):
        read(content)


@pytest.mark.parametrize("key", ["lr", "epochs", "local.lr", "privacy", "noise_multiplier", "simulated", "dry-run"])
def test_hyper_parameters_are_refused_by_name(key):
    content = honest()
    content[wire.CONFIG][key] = 0.1
    with pytest.raises(UsageError, match=f"sets '{key}'"):
        read(content)


@pytest.mark.parametrize("key", ["job", "round", "attempt"])
def test_a_request_without_identity_is_refused(key):
    content = honest()
    del content[wire.CONFIG][key]
    with pytest.raises(UsageError):
        read(content)


def extra(key: str, record: Any) -> Callable[[RecordDict], None]:
    def change(content: RecordDict) -> None:
        content[key] = record

    return change


def without(key: str) -> Callable[[RecordDict], None]:
    def change(content: RecordDict) -> None:
        del content[key]

    return change


RECORDS = {
    "no config": without(wire.CONFIG),
    "no arrays": without(wire.ARRAYS),
    "a second config": extra("more", ConfigRecord({})),
    "metrics": extra("metrics", MetricRecord({"x": 1})),
    "metrics for peers": extra(wire.PEERS, MetricRecord({"x": 1})),
    "arrays for peers": extra(wire.PEERS, wire.encode_arrays(model())),
    "arrays for config": extra(wire.CONFIG, wire.encode_arrays(model())),
    "config for arrays": extra(wire.ARRAYS, ConfigRecord({})),
    "more arrays": extra("arrays2", wire.encode_arrays(model())),
    "no array at all": extra(wire.ARRAYS, ArrayRecord()),
}


@pytest.mark.parametrize("change", RECORDS.values(), ids=RECORDS.keys())
def test_other_records_are_refused(change):
    content = honest()
    change(content)
    with pytest.raises(UsageError):
        read(content)


def test_what_peers_say_is_optional():
    content = honest()
    _, digest = read(content)
    del content[wire.PEERS]
    assert read(content)[1] == digest


def npy(array: np.ndarray, **options: bool) -> bytes:
    file = io.BytesIO()
    np.save(file, array, **options)
    return file.getvalue()


def put(name: str, array: Array) -> RecordDict:
    content = honest()
    record = content[wire.ARRAYS]
    content[wire.ARRAYS] = ArrayRecord({**dict(record.items()), name: array})
    return content


dtypes = st.sampled_from(["float32", "float64", "int64", "float16", "bool", ">f4"])
shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)


@LAWS
@given(st.sampled_from(sorted(EXPECTED)), dtypes, shapes, dtypes, shapes)
def test_other_shapes_and_dtypes_are_refused_whatever_the_payload_is(name, dtype, shape, in_fact, really):
    """`dtype, shape` are what Flower's header says, `in_fact, really` what the bytes are."""
    content = put(name, Array(dtype, shape, "numpy.ndarray", npy(np.zeros(really, in_fact))))
    if (dtype, shape) == (in_fact, really) == EXPECTED[name]:
        read(content)
        return
    with pytest.raises(UsageError, match=f"array '{name}'"):
        read(content)


@LAWS
@given(st.text(max_size=8).filter(lambda name: name not in EXPECTED))
def test_an_array_of_another_name_is_refused(name):
    with pytest.raises(UsageError, match="arrays are not the model's"):
        read(put(name, Array(np.zeros(3, np.float32))))


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_a_missing_array_is_refused(name):
    content = honest()
    content[wire.ARRAYS] = wire.encode_arrays({key: array for key, array in model().items() if key != name})
    with pytest.raises(UsageError, match=f"'{name}'"):
        read(content)


class Bomb:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def claiming(shape: tuple[int, ...], descr: str = "<f4") -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": descr, "fortran_order": False, "shape": shape})
    return file.getvalue()


def zipped() -> bytes:
    file = io.BytesIO()
    np.savez(file, np.zeros((2, 3), np.float32))
    return file.getvalue()


PAYLOADS = {
    "nothing": b"",
    "junk": b"junk",
    "raw bytes": bytes(24),
    "an archive": zipped(),
    "a broken archive": b"PK\x03\x04junk",
    "cut short": npy(np.zeros((2, 3), np.float32))[:-1],
    "a header alone": claiming((2, 3)),
    "a petabyte by its own header": claiming((10**15,)),
    "negative": claiming((-2, 3)),
    "objects by its header": claiming((2, 3), "|O"),
    "far too many bytes": npy(np.zeros((2, 3), np.float32)) + bytes(1_000_000),
}


@pytest.mark.parametrize("payload", PAYLOADS.values(), ids=PAYLOADS.keys())
def test_a_payload_that_lies_is_refused_in_words(payload):
    with pytest.raises(UsageError, match="array 'w'"):
        read(put("w", Array("float32", (2, 3), "numpy.ndarray", payload)))


@pytest.mark.parametrize("stype", ["", "numpy", "torch", "pickle"])
def test_other_serialisations_are_refused(stype):
    with pytest.raises(UsageError, match="array 'w'"):
        read(put("w", Array("float32", (2, 3), stype, npy(np.zeros((2, 3), np.float32)))))


def test_a_pickled_payload_is_never_unpickled(tmp_path):
    mark = tmp_path / "ran"
    objects = np.array([[Bomb(mark)] * 3] * 2, dtype=object)
    for payload in (pickle.dumps(Bomb(mark)), objects.dumps(), npy(objects, allow_pickle=True)):
        mark.unlink(missing_ok=True)
        with pytest.raises(UsageError, match="array 'w'"):
            read(put("w", Array("float32", (2, 3), "numpy.ndarray", payload)))
        assert not mark.exists()
    np.load(io.BytesIO(npy(objects, allow_pickle=True)), allow_pickle=True)
    assert mark.exists()  # it would have worked


# --- the digest -------------------------------------------------------------------------------------

questions = st.tuples(st.integers(1, 2), st.integers(1, 2), st.sampled_from(["train", "evaluate"]), st.integers(0, 2))


@LAWS
@given(questions, questions, st.booleans())
def test_two_digests_are_equal_if_and_only_if_identity_kind_and_bytes_are(one, other, peers):
    if "evaluate" in (one[2], other[2]) and 2 in (one[1], other[1]):
        return  # evaluations are not repeated

    def digest(question: tuple[int, int, str, int], told: bool) -> str:
        number, attempt, kind, seed = question
        content = honest(number, attempt, seed)
        if told:
            content[wire.PEERS] = ConfigRecord({"statements": ["other"], "roster": ""})
        return read(content, kind)[1]

    assert (digest(one, False) == digest(other, peers)) == (one == other)


@LAWS
@given(st.sampled_from(sorted(EXPECTED)), st.data())
def test_one_bit_of_one_array_is_another_digest(name, data):
    content, changed = honest(), honest()
    payload = bytearray(content[wire.ARRAYS][name].data)
    place = data.draw(st.integers(0, len(payload) * 8 - 1))
    payload[place // 8] ^= 1 << place % 8
    dtype, shape = EXPECTED[name]
    record = dict(changed[wire.ARRAYS].items()) | {name: Array(dtype, shape, "numpy.ndarray", bytes(payload))}
    changed[wire.ARRAYS] = ArrayRecord(record)
    who = Identity(JOB.digest, 1, 1, "client-1")
    assert request_digest(who, "train", content) != request_digest(who, "train", changed)
    assert request_digest(who, "train", content) == request_digest(who, "train", honest())


def test_another_jobs_request_has_another_digest():
    mine, theirs = (Identity(job.digest, 1, 1, "client-1") for job in (JOB, OTHER))
    assert request_digest(mine, "train", honest()) != request_digest(theirs, "train", honest())


# --- its size ---------------------------------------------------------------------------------------

MIB = 1 << 20
MODELS: dict[str, list[tuple[str, tuple[int, ...]]]] = {
    "nothing": [],
    "scalars": [("float32", ()), ("int64", ()), ("bool", ())],
    "empty arrays": [("float32", (0,)), ("float64", (3, 0))],
    "many small arrays": [("float32", (7,))] * 300,
    "one chunk to the byte": [("uint8", (5 * MIB - 128,))],
    "one byte more": [("uint8", (5 * MIB - 127,))],
    "a payload of one chunk": [("uint8", (5 * MIB,))],
    "three chunks": [("float32", (13 * MIB // 4,))],
    "a real model": [("float32", (2048, 1024)), ("float32", (1024,)), ("float16", (3000, 1000))],
}


@pytest.mark.parametrize("arrays", MODELS.values(), ids=MODELS.keys())
def test_no_honest_message_has_more_objects_than_are_fetched(arrays):
    rng = np.random.default_rng(0)  # Flower stores equal chunks once: these differ
    expected = {f"layer-{number}": array for number, array in enumerate(arrays)}
    content = honest()
    made = {
        name: np.frombuffer(rng.bytes(int(np.prod(shape)) * np.dtype(dtype).itemsize), dtype).reshape(shape)
        for name, (dtype, shape) in expected.items()
    }
    content[wire.ARRAYS] = wire.encode_arrays(made)
    sent = message(content)
    assert sent.metadata.src_node_id == SERVER_NODE_ID
    objects = list(iterate_object_tree(get_object_tree(sent)))
    assert len(objects) <= most_objects(expected) <= 2 * len(objects) + 64 + len(expected)
