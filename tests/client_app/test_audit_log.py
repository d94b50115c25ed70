"""The audit log: what was decided can't be edited, dropped, moved or made up without showing."""

import hashlib
import json
import multiprocessing
import os
import resource
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from client_app.audit_log import START, AuditLog, read_audit
from fedplat.errors import JobError

LAWS = settings(max_examples=150, deadline=None)
DECISIONS = [
    ("started", ""),
    ("admitted", "round 1"),
    ("refused", 'policy.hours: "no"'),
    ("released", "é\nü"),
    ("stopped", ""),
]


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> tuple[bytes, str]:
    """A log's bytes, and its head as a site would sign it."""
    path = tmp_path_factory.mktemp("log") / "audit.jsonl"
    log = AuditLog(path)
    for number, (decision, reason) in enumerate(DECISIONS):
        log.note(decision, reason, {"round": number, "job": "ab"})
    log.close()
    return path.read_bytes(), log.head


def shown(path: Path, content: bytes, signed: str) -> bool:
    """Does the log, with the head that the site signed into its replies, give the change away?"""
    path.write_bytes(content)
    try:
        read_audit(path)
        opened = AuditLog(path)
    except JobError:
        return True
    opened.close()
    return opened.head != signed


def test_what_was_noted_is_read_back_in_order(tmp_path):
    path = tmp_path / "audit.jsonl"
    for first in (0, 3):  # goes on after a restart
        log = AuditLog(path)
        for number in range(first, first + 3):
            log.note("admitted", f"r{number}", {"round": number})
        log.close()
    entries = read_audit(path)
    assert [(e["seq"], e["reason"], e["round"]) for e in entries] == [(n + 1, f"r{n}", n) for n in range(6)]
    assert entries[0]["previous"] == START
    assert log.head == hashlib.sha256(path.read_bytes().split(b"\n")[-2]).hexdigest()
    assert log.seq == 6 and stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_log_that_was_only_opened_is_empty(tmp_path):
    AuditLog(tmp_path / "audit.jsonl").close()
    assert read_audit(tmp_path / "audit.jsonl") == []


def test_the_untouched_log_is_not_shown_as_changed(written, tmp_path):
    assert not shown(tmp_path / "audit.jsonl", *written)


@LAWS
@given(st.data())
def test_any_flipped_bit_shows(written, tmp_path_factory, data):
    content, head = written
    place = data.draw(st.integers(0, len(content) * 8 - 1))
    flipped = bytearray(content)
    flipped[place // 8] ^= 1 << place % 8
    assert shown(tmp_path_factory.getbasetemp() / "flipped.jsonl", bytes(flipped), head)


@LAWS
@given(st.integers(0, len(DECISIONS) - 2), st.data())
def test_a_change_before_the_last_line_shows_without_any_signature(written, tmp_path_factory, number, data):
    lines = written[0].split(b"\n")[:-1]
    line = bytearray(lines[number])
    line[data.draw(st.integers(0, len(line) - 1))] ^= data.draw(st.integers(1, 255))
    path = tmp_path_factory.getbasetemp() / "changed.jsonl"
    path.write_bytes(b"".join(part + b"\n" for part in [*lines[:number], bytes(line), *lines[number + 1 :]]))
    with pytest.raises(JobError, match="the audit log was changed"):
        read_audit(path)


def moved(change: Callable[[list[bytes], int, int], None], written: tuple[bytes, str], path: Path) -> None:
    content, head = written
    lines = content.split(b"\n")[:-1]
    for first in range(len(lines)):
        for second in range(len(lines)):
            changed = list(lines)
            change(changed, first, second)
            if changed != lines:
                assert shown(path, b"".join(line + b"\n" for line in changed), head), (first, second)


def test_any_removed_swapped_doubled_or_inserted_line_shows(written, tmp_path):
    def remove(lines: list[bytes], first: int, second: int) -> None:
        del lines[first]

    def swap(lines: list[bytes], first: int, second: int) -> None:
        lines[first], lines[second] = lines[second], lines[first]

    def double(lines: list[bytes], first: int, second: int) -> None:
        lines.insert(first, lines[second])

    def make_up(lines: list[bytes], first: int, second: int) -> None:
        """With a number and a hash that fit what stands before it."""
        before = hashlib.sha256(lines[first - 1]).hexdigest() if first else START
        lines.insert(first, json.dumps({"seq": first + 1, "previous": before, "decision": "admitted"}).encode())

    for change in (remove, swap, double, make_up):
        moved(change, written, tmp_path / "audit.jsonl")


def test_lines_cut_off_the_end_show_against_the_signed_head(written, tmp_path):
    content, head = written
    lines = content.split(b"\n")[:-1]
    for kept in range(len(lines)):
        assert shown(tmp_path / "audit.jsonl", b"".join(line + b"\n" for line in lines[:kept]), head)


@LAWS
@given(st.data())
def test_a_torn_last_line_is_cut_and_the_log_goes_on(written, tmp_path_factory, data):
    """A crash in a write: whatever part of a line is there, all whole lines stay and the next one follows them."""
    content = written[0]
    starts = [0, *(i + 1 for i, byte in enumerate(content) if byte == 10)]
    cut = data.draw(st.integers(0, len(content)).filter(lambda length: length not in starts))
    path = tmp_path_factory.getbasetemp() / "torn.jsonl"
    path.write_bytes(content[:cut])
    whole = content[:cut].count(b"\n")
    assert len(read_audit(path)) == whole
    log = AuditLog(path)
    log.note("started")
    log.close()
    assert [entry["decision"] for entry in read_audit(path)] == [d for d, _ in DECISIONS[:whole]] + ["started"]


@pytest.mark.parametrize("last", [b"junk", b"[]", b"{}", b"null", b'{"seq":"x"}', b'{"seq":null}'])
def test_a_damaged_last_line_is_not_built_upon(last, written, tmp_path):
    (tmp_path / "audit.jsonl").write_bytes(written[0] + last + b"\n")
    with pytest.raises(JobError, match="the last line is damaged"):
        AuditLog(tmp_path / "audit.jsonl")


def _fill(path: Path) -> None:
    """Run out of room in the middle of a line."""
    log = AuditLog(path)
    log.note("started")
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 20, resource.RLIM_INFINITY))
    try:
        log.note("admitted", "there is room for half of this")
    except (OSError, JobError):
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        log.note("failed", "the disk was full")
        os._exit(0)
    os._exit(1)


def test_half_a_line_is_an_error_and_leaves_none_behind(tmp_path):
    """A decision that could not be written down whole must not take effect."""
    child = multiprocessing.get_context("fork").Process(target=_fill, args=(tmp_path / "audit.jsonl",))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert [entry["decision"] for entry in read_audit(tmp_path / "audit.jsonl")] == ["started", "failed"]
