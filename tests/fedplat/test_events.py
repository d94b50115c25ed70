"""The event log: what was appended is read back, whatever the moment of a crash; a resume undoes what came later."""

import typing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedplat.errors import UsageError
from fedplat.events import (
    EVENT,
    Checkpointed,
    ClientEvaluated,
    ClientFailed,
    ClientTrained,
    Evaluated,
    Event,
    EventLog,
    Interrupted,
    PrivacySpent,
    Resumed,
    RoundFinished,
    RoundStarted,
    RunFailed,
    RunFinished,
    RunStarted,
    read_events,
)

LAWS = settings(max_examples=50, deadline=None)
rounds = st.integers(0, 1000)
text = st.text(max_size=10)
counts = st.integers(0, 2**40)
finite = st.floats(allow_nan=False, allow_infinity=False)
metrics = st.dictionaries(text, finite, max_size=3)
EVENTS: dict[type, st.SearchStrategy[Any]] = {
    RunStarted: st.builds(
        RunStarted, time=finite, run=text, job_digest=text, clients=counts, rounds=rounds, parameters=counts,
        versions=st.dictionaries(text, text, max_size=2),
    ),
    RoundStarted: st.builds(RoundStarted, time=finite, round=rounds, cohort=st.lists(text, max_size=3)),
    ClientTrained: st.builds(
        ClientTrained, time=finite, round=rounds, client=text, num_examples=counts, update_norm=finite, metrics=metrics
    ),
    ClientFailed: st.builds(
        ClientFailed, time=finite, round=rounds, client=text, phase=st.sampled_from(["train", "evaluate"]),
        kind=st.sampled_from(["error", "late", "refused"]), reason=text, attempt=counts,
    ),
    RoundFinished: st.builds(
        RoundFinished, time=finite, round=rounds, aggregated=st.booleans(), accepted=counts, failed=counts,
        late=counts, refused=counts, metrics=metrics, seconds=finite, bytes_down=counts, bytes_up=counts,
    ),
    Evaluated: st.builds(
        Evaluated, time=finite, round=rounds, where=st.sampled_from(["server", "clients"]), num_examples=counts,
        metrics=metrics, best=st.booleans(),
    ),
    ClientEvaluated: st.builds(
        ClientEvaluated, time=finite, round=rounds, client=text, num_examples=counts, metrics=metrics
    ),
    PrivacySpent: st.builds(
        PrivacySpent, time=finite, round=rounds, unit=st.sampled_from(["sample", "client"]),
        relation=st.sampled_from(["add-remove", "zero-out", "replace-one"]), epsilon=finite, delta=finite,
        accountant=st.sampled_from(["pld", "rdp", "prv"]), releases=counts, trusts_server=st.booleans(),
        insecure_noise=st.booleans(),
    ),
    Checkpointed: st.builds(Checkpointed, time=finite, round=rounds),
    Resumed: st.builds(Resumed, time=finite, round=rounds),
    Interrupted: st.builds(Interrupted, time=finite, round=rounds),
    RunFailed: st.builds(RunFailed, time=finite, round=rounds, reason=text),
    RunFinished: st.builds(
        RunFinished, time=finite, round=rounds, reason=st.sampled_from(["rounds", "target", "patience"]),
        model_sha256=text,
    ),
}  # fmt: skip
plain_events = st.one_of(*[strategy for kind, strategy in EVENTS.items() if kind is not Resumed])


def write(path: Path, events: list[Event]) -> None:
    log = EventLog(path)
    for event in events:
        log.append(event)
    log.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("events")


def fresh(folder: Path) -> Path:
    path = folder / "events.jsonl"
    path.unlink(missing_ok=True)
    return path


def test_strategies_know_every_event() -> None:
    assert set(EVENTS) == set(typing.get_args(Event))


@pytest.mark.parametrize("kind", EVENTS, ids=lambda kind: kind.__name__)
def test_every_event_survives_json(kind: type) -> None:
    @settings(max_examples=20, deadline=None)
    @given(EVENTS[kind])
    def law(event: Event) -> None:
        assert EVENT.validate_json(event.model_dump_json()) == event

    law()


@LAWS
@given(st.lists(plain_events, max_size=6))
def test_appended_events_are_read_back_in_order(folder: Path, events: list[Event]) -> None:
    path = fresh(folder)
    write(path, events)
    assert read_events(path) == events


@LAWS
@given(st.lists(plain_events, max_size=4), st.lists(plain_events, max_size=4))
def test_closing_and_opening_the_log_again_loses_nothing(folder: Path, one: list[Event], other: list[Event]) -> None:
    path = fresh(folder)
    write(path, one)
    write(path, other)
    assert read_events(path) == one + other


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_metric_of_a_diverged_model_does_not_corrupt_the_log(tmp_path: Path, value: float) -> None:
    """A loss of NaN is what a person most needs to read afterwards."""
    path = tmp_path / "events.jsonl"
    write(path, [Evaluated(time=1, round=1, where="server", num_examples=3, metrics={"loss": value})])
    (event,) = read_events(path)
    assert repr(event.metrics["loss"]) == repr(value)


def test_listeners_hear_every_event_in_order(tmp_path: Path) -> None:
    heard: list[Event] = []
    log = EventLog(tmp_path / "events.jsonl", (heard.append,))
    events: list[Event] = [Checkpointed(round=n) for n in range(3)]
    for event in events:
        log.append(event)
    log.sync()
    assert heard == events == read_events(tmp_path / "events.jsonl")
    log.close()


@LAWS
@given(st.lists(plain_events, min_size=1, max_size=3), st.data())
def test_log_cut_at_any_byte_reads_as_its_whole_lines(folder: Path, events: list[Event], data: st.DataObject) -> None:
    path = fresh(folder)
    write(path, events)
    content = path.read_bytes()
    cut = data.draw(st.integers(0, len(content)))
    path.write_bytes(content[:cut])
    whole = content[:cut].count(b"\n")
    assert read_events(path) == events[:whole]


def test_line_torn_inside_a_letter_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    write(path, [Checkpointed(time=1, round=1), RunFailed(time=2, round=2, reason="größer")])
    content = path.read_bytes()
    path.write_bytes(content[: content.index("ö".encode()) + 1])
    assert read_events(path) == [Checkpointed(time=1, round=1)]


@LAWS
@given(st.lists(plain_events, min_size=1, max_size=3), plain_events, st.data())
def test_appending_after_a_torn_line_leaves_a_whole_log(
    folder: Path, events: list[Event], later: Event, data: st.DataObject
) -> None:
    path = fresh(folder)
    write(path, events)
    content = path.read_bytes()
    cut = data.draw(st.integers(0, len(content)))
    path.write_bytes(content[:cut])
    write(path, [later])
    assert read_events(path) == [*events[: content[:cut].count(b"\n")], later]


@LAWS
@given(st.lists(plain_events, max_size=8), st.integers(0, 1000), st.lists(plain_events, max_size=3))
def test_resume_drops_later_rounds_and_earlier_endings(
    folder: Path, before: list[Event], committed: int, after: list[Event]
) -> None:
    path = fresh(folder)
    resumed = Resumed(time=1, round=committed)
    write(path, [*before, resumed, *after])
    kept = [
        event
        for event in before
        if not isinstance(event, Interrupted | RunFailed)
        # From round 0 everything is done again, the evaluation of the initial model included.
        and (isinstance(event, RunStarted) or (event.round <= committed and committed > 0))
    ]
    assert read_events(path) == [*kept, resumed, *after]


def test_a_second_resume_may_go_back_further_than_the_first(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    marks = [Checkpointed(time=n, round=n) for n in range(1, 5)]
    write(path, [*marks, Resumed(time=9, round=3), marks[3], Resumed(time=10, round=1), marks[1]])
    assert read_events(path) == [marks[0], Resumed(time=10, round=1), marks[1]]


@pytest.mark.parametrize(
    "line", [b"{", b"", b"null", b"[]", b'{"event":"nonsense","time":1}', b'{"event":"checkpointed"}',
             b'{"event":"checkpointed","time":1,"round":1,"more":1}', b"\xff\xfe"],
)  # fmt: skip
def test_corrupt_line_in_the_middle_is_an_error_that_names_it(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "events.jsonl"
    good = Checkpointed(time=1, round=1).model_dump_json().encode()
    content = good + b"\n" + line + b"\n" + good + b"\n"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=r"events\.jsonl: line 2 is not an event"):
        read_events(path)
    assert path.read_bytes() == content


def test_missing_log_says_that_this_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not a fedplat run directory"):
        read_events(tmp_path / "events.jsonl")
