"""SIGKILL at random moments, a full disk, a read-only ledger: what was granted is there, what was there stays."""

import itertools
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from fedplat.errors import JobError, UsageError
from privacy.ledger import Budget, Ledger
from privacy.ledger_counter import Counter, Head, Note
from tests.privacy.ledgers import ACCOUNT, charge, fill, new_ledger, processes, python

KILLS = 36


def spend_for_ever(path: Path, report: Path) -> None:
    """Reserve, report what was granted, commit two of three, until killed."""
    with report.open("ab", buffering=0) as file:
        ledger = Ledger.open(path, "hospital")
        for number in itertools.count():
            reservation = ledger.reserve(charge(number, noise=50.0))
            file.write(reservation.token.encode() + b"\n")
            if number % 3:
                ledger.commit([reservation])


def test_killed_at_random_moments_the_ledger_verifies_and_holds_every_grant(tmp_path):
    """Three processes at a time: the kill of one falls into the transactions of the others."""
    path, rng = tmp_path / "ledger.sqlite", random.Random(4)
    new_ledger(path, Budget(2000.0, 1e-6, 6.0)).close()
    spent = 0.0
    for batch in range(KILLS // 3):
        reports = [tmp_path / f"report-{batch}-{child}" for child in range(3)]
        children = [processes().Process(target=spend_for_ever, args=(path, report)) for report in reports]
        for child in children:
            child.start()
        while not all(report.exists() and report.stat().st_size for report in reports):
            assert all(child.is_alive() for child in children)
            time.sleep(0.002)
        for child in children:
            time.sleep(rng.uniform(0, 0.02))
            child.kill()
            child.join()
            assert child.exitcode == -signal.SIGKILL
        with Ledger.open(path, "hospital") as ledger:  # recovers and verifies
            tokens = {entry.body["token"] for entry in ledger.history(ACCOUNT) if entry.kind == "reserve"}
            now = ledger.balance(ACCOUNT).rdp_spent
        granted = {line for report in tmp_path.glob("report-*") for line in report.read_text().splitlines()}
        assert granted <= tokens
        assert now >= spent
        spent = now
    assert len(granted) > KILLS


@pytest.mark.parametrize("moment", ["before the commit", "after the commit", "a killed commit came back"])
def test_a_crash_between_counter_and_database_is_no_alarm(moment, tmp_path):
    path = tmp_path / "ledger.sqlite"
    ledger = new_ledger(path)
    fill(ledger, 2)
    head, note = ledger.head(), ledger.counter.read()
    ends = {
        "before the commit": (head, Head(head.seq + 5, "ab" * 32)),
        "after the commit": (note.before, head),
        "a killed commit came back": (note.before, Head(head.seq, "ab" * 32)),
    }
    ledger.counter.write_ahead(Note(ledger.identity, note.generation + 1, *ends[moment]))
    ledger.close()
    with Ledger.open(path, "hospital") as again:
        fill(again, 2, first=2)
        assert again.balance(ACCOUNT).releases == 4
    Ledger.open(path, "hospital").close()


def test_a_torn_write_of_the_counter_leaves_a_slot_that_is_true(tmp_path):
    """Whichever single slot a power cut spoils, the ledger opens and still knows an older copy."""
    path = tmp_path / "ledger.sqlite"
    for releases in (1, 2):
        with new_ledger(path) as ledger:
            fill(ledger, releases)
        whole = ledger.counter.path.read_bytes()
        newest = ledger.counter.read().generation % 2
        for slot in (newest, 2):  # the only ones that the last transaction wrote
            ledger.counter.path.write_bytes(whole[: slot * 4096 + 100] + bytes(412) + whole[slot * 4096 + 512 :])
            Ledger.open(path).close()
        path.unlink()
        ledger.counter.path.unlink()


def test_a_counter_alternates_between_its_slots(tmp_path):
    counter = Counter(tmp_path / "counter")
    counter.create("id", Head(1, "00"))
    for generation in range(2, 6):
        note = Note("id", generation, Head(generation - 1, "00"), Head(generation, "00"))
        counter.write_ahead(note)
        assert counter.read() == note
        previous = counter.path.read_bytes()
        counter.settle(note)
        assert counter.read().settled and counter.path.read_bytes()[:8192] == previous[:8192]


def test_a_full_database_refuses_and_keeps_what_it_held(tmp_path):
    path = tmp_path / "ledger.sqlite"
    with new_ledger(path, None) as ledger:
        fill(ledger, 3)
        before = ledger.head()
        with ledger._engine.connect() as connection:
            raw = connection.connection.dbapi_connection
            pages = raw.execute("PRAGMA page_count").fetchone()[0]
            raw.execute(f"PRAGMA max_page_count = {pages}")
        with pytest.raises(JobError, match=r"the disk is full\. Nothing was spent or lost"):
            ledger.reserve_all([charge(number) for number in range(500)])
        assert ledger.verify() == before
        with ledger._engine.connect() as connection:
            connection.connection.dbapi_connection.execute("PRAGMA max_page_count = 1000000")
        fill(ledger, 1)
        ledger.verify()


FILLER = """
from pathlib import Path
from fedplat.errors import JobError
from privacy.ledger import Ledger
from tests.privacy.ledgers import ACCOUNT, charge, fill, new_ledger
path = Path(args[0]) / "ledger.sqlite"
ledger = new_ledger(path, None)
fill(ledger, 2)
try:
    while True:
        held = ledger.head()
        ledger.reserve_all([charge(number) for number in range(50)])
except JobError as error:
    print(error)
assert ledger.verify() == held
ledger.close()
Ledger.open(path, readonly=True).close()
print("intact")
"""


def test_a_disk_that_is_really_full_is_survived(tmp_path):
    """A tmpfs of one megabyte in a mount namespace of its own; where that is not allowed, nothing is tested."""
    mount = ["unshare", "--mount", "sh", "-c", f'mount -t tmpfs -o size=1m none {tmp_path} && exec "$@"', "sh"]
    try:
        subprocess.run([*mount, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no permission to mount a tmpfs")
    code = f'import json, sys; args = ["{tmp_path}"]\n' + FILLER
    root = Path(__file__).parents[2]
    done = subprocess.run([*mount, sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "ledger.sqlite" in done.stdout and done.stdout.endswith("intact\n"), done.stdout


READER = """
import os
from pathlib import Path
from fedplat.errors import UsageError
from privacy.ledger import Ledger
from tests.privacy.ledgers import ACCOUNT, charge
if os.getuid() == 0:
    os.setuid(65534)
ledger = Ledger.open(Path(args[0]), readonly=args[1] == "readonly")
print(ledger.balance(ACCOUNT).releases)
try:
    ledger.reserve(charge())
except UsageError as error:
    print(error)
"""


@pytest.fixture
def open_folder():
    """A folder that other users may enter; pytest's own may not."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.parametrize("mode", ["readonly", "read and write"])
def test_a_read_only_ledger_can_be_read_but_not_spent_from(mode, open_folder):
    path = open_folder / "ledger.sqlite"
    ledger = new_ledger(path)
    fill(ledger, 2)
    for file in open_folder.iterdir():  # a reader beside an open writer: -wal and -shm are there
        file.chmod(0o444)
    if os.getuid() != 0:
        open_folder.chmod(0o555)
    out, err = python(READER, path, mode).communicate(timeout=60)
    open_folder.chmod(0o755)
    assert out.startswith("2\n"), err
    assert "the ledger is read-only. Nothing is trained" in out
    assert ledger.balance(ACCOUNT).releases == 2
    ledger.close()


def test_readonly_refuses_to_write(tmp_path):
    path = tmp_path / "ledger.sqlite"
    new_ledger(path).close()
    with Ledger.open(path, readonly=True) as ledger, pytest.raises(UsageError, match="the ledger is read-only"):
        ledger.reserve(charge())


def test_only_the_owner_may_read_the_files(tmp_path):
    with new_ledger(tmp_path / "ledger.sqlite") as ledger:
        fill(ledger, 1)
        files = list(tmp_path.iterdir())
        assert len(files) == 4 and {file.stat().st_mode & 0o777 for file in files} == {0o600}


def test_commits_are_synced(tmp_path):
    with new_ledger(tmp_path / "ledger.sqlite") as ledger, ledger._engine.connect() as connection:
        raw = connection.connection.dbapi_connection
        assert isinstance(raw, sqlite3.Connection)
        settings = {name: raw.execute(f"PRAGMA {name}").fetchone()[0] for name in ("journal_mode", "synchronous")}
        assert settings == {"journal_mode": "wal", "synchronous": 2}
