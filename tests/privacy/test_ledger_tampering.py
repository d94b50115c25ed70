"""Whatever is done to a ledger's files behind its back is noticed and named; nothing is made anew in silence."""

import random
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from fedplat.errors import FedplatError, JobError, UsageError
from privacy.ledger import Ledger, LedgerTampered, ReleaseIdentity
from privacy.ledger_chain import make_entry, read_entry
from privacy.ledger_counter import Head
from privacy.ledger_schema import TRIGGERS, entries
from tests.privacy.ledgers import ACCOUNT, charge, fill, new_ledger

OTHER = "other/sample"


@pytest.fixture
def path(tmp_path) -> Path:
    """A closed ledger of two accounts with interleaved histories."""
    path = tmp_path / "ledger.sqlite"
    with new_ledger(path) as ledger:
        ledger.open_account(OTHER, dataset="other", unit="sample", relation="add-remove", budget=None, delta=1e-5)
        for number in range(4):
            ledger.commit(ledger.reserve_all([charge(number), charge(number, account=OTHER)]))
    return path


def edit(path: Path, *statements: str) -> None:
    """Do as somebody would who opens the file with another program and puts the triggers back afterwards."""
    connection = sqlite3.connect(path, isolation_level=None)
    for name in TRIGGERS:
        connection.execute(f"DROP TRIGGER {name}")
    for statement in statements:
        assert connection.execute(statement).rowcount > 0
    for trigger in TRIGGERS.values():
        connection.execute(trigger)
    connection.close()


def swap(column: str, one: int, other: int) -> str:
    values = f"CASE seq WHEN {one} THEN (SELECT {column} FROM entries WHERE seq = {other})"
    values += f" ELSE (SELECT {column} FROM entries WHERE seq = {one}) END"
    return f"UPDATE entries SET {column} = {values} WHERE seq IN ({one}, {other})"


LAST = "(SELECT max(seq) FROM entries)"
EDITS = {
    "edited body": (
        ["UPDATE entries SET body = replace(body, '\"round\":2', '\"round\":9') WHERE seq = 14"],
        "entry 14",
    ),
    "cheaper charge": (
        ["UPDATE entries SET body = replace(body, '\"rdp\":0.12', '\"rdp\":0.01') WHERE seq = 6"],
        "entry 6 (account 'digits/sample') was changed",
    ),
    "edited time": (["UPDATE entries SET time = time + 1 WHERE seq = 7"], "entry 7"),
    "edited kind": (["UPDATE entries SET kind = 'note' WHERE seq = 6"], "entry 6"),
    "white space in a body": (["UPDATE entries SET body = body || ' ' WHERE seq = 8"], "entry 8"),
    "swapped bodies": ([swap("body", 6, 10)], "entry 6"),
    "last entry deleted": ([f"DELETE FROM entries WHERE seq = {LAST}"], "ends at entry 20"),
    "last ten deleted": ([f"DELETE FROM entries WHERE seq > {LAST} - 10"], "ends at entry 11"),
    "middle entry deleted": (["DELETE FROM entries WHERE seq = 9"], "entry 9"),
    "middle entry deleted, others moved up": (
        ["DELETE FROM entries WHERE seq = 9", "UPDATE entries SET seq = seq - 1 WHERE seq > 9"],
        "ends at entry 20",
    ),
    "entry moved to another account": (
        [f"UPDATE entries SET account = '{OTHER}', number = 99 WHERE seq = 6"],
        "entry 6",
    ),
    "head replaced": (
        [f"UPDATE entries SET head = zeroblob(32) WHERE seq = {LAST}"],
        "is not the one that its counter",
    ),
    "earlier head replaced": (
        ["UPDATE entries SET head = zeroblob(32) WHERE seq = 9"],
        "does not fit the ledger's head",
    ),
    "event replaced": (
        ["UPDATE events SET json = replace(json, '5.0', '500.0')"],
        "the event",
    ),
    "everything deleted": (["DELETE FROM entries WHERE seq > 0"], "entry 0"),
}


@pytest.mark.parametrize(("statements", "message"), EDITS.values(), ids=EDITS.keys())
def test_an_edit_is_noticed_and_named(statements, message, path):
    edit(path, *statements)
    with pytest.raises(LedgerTampered) as found:
        Ledger.open(path, "hospital")
    assert message in str(found.value)


def test_an_edit_that_recomputes_its_own_hash_breaks_the_chain(path):
    """Somebody who knows the format makes one charge cheaper, and hashes that entry anew."""
    with Ledger.open(path) as ledger, ledger._reading() as transaction:
        rows = transaction.connection.execute(entries.select().order_by(entries.c.seq)).all()
    victim, before = next(row for row in rows if row.seq == 10), next(row for row in rows if row.seq == 9)
    previous = [read_entry(row) for row in rows if row.account == victim.account and row.seq < 10][-1]
    body = read_entry(victim).body | {"rdp": 0.0}
    forged = make_entry(Head(9, before.head.hex()), previous, victim.account, victim.kind, victim.time, body)
    connection = sqlite3.connect(path)
    for name in TRIGGERS:
        connection.execute(f"DROP TRIGGER {name}")
    row = forged.as_row()
    connection.execute(
        "UPDATE entries SET body = ?, hash = ?, head = ? WHERE seq = 10", (row["body"], row["hash"], row["head"])
    )
    for trigger in TRIGGERS.values():
        connection.execute(trigger)
    connection.commit()
    connection.close()
    with pytest.raises(LedgerTampered, match="another cost than that of its event") as found:
        Ledger.open(path)
    assert (found.value.account, found.value.seq) == (ACCOUNT, 10)


@pytest.mark.parametrize("name", TRIGGERS)
def test_a_missing_guard_is_noticed(name, path):
    connection = sqlite3.connect(path)
    connection.execute(f"DROP TRIGGER {name}")
    connection.close()
    with pytest.raises(LedgerTampered, match=f"guards of the ledger were changed: {name}"):
        Ledger.open(path, verify=False)


def test_a_foreign_trigger_is_noticed(path):
    connection = sqlite3.connect(path)
    connection.execute("CREATE TRIGGER mine AFTER INSERT ON entries BEGIN SELECT 1; END")
    connection.close()
    with pytest.raises(LedgerTampered, match="mine"):
        Ledger.open(path)


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE entries SET body = '{}'",
        "DELETE FROM entries",
        "DELETE FROM events",
        "UPDATE accounts SET name = 'x'",
        "INSERT OR REPLACE INTO entries (seq, account, number, kind, time, body, prev_hash, hash, head) "
        "SELECT seq, account, number, kind, time, '{}', prev_hash, hash, head FROM entries WHERE seq = 6",
    ],
)
def test_guards_refuse_plain_sql(statement, path):
    connection = sqlite3.connect(path)
    with pytest.raises(sqlite3.IntegrityError, match="append-only"):
        connection.execute(statement)
    connection.close()
    Ledger.open(path).close()


def test_an_older_copy_is_refused_with_what_to_do(path, tmp_path):
    old = tmp_path / "backup.sqlite"
    shutil.copy(path, old)
    with Ledger.open(path) as ledger:
        fill(ledger, 1)
    shutil.copy(old, path)
    with pytest.raises(
        LedgerTampered, match=r"Restored from a backup.*Put back the newest copy.*fedplat budget --init"
    ):
        Ledger.open(path)


def test_a_copy_older_by_one_transaction_is_refused(path, tmp_path):
    old = tmp_path / "backup.sqlite"
    shutil.copy(path, old)
    with Ledger.open(path) as ledger:
        ledger.reserve(charge(50))
    shutil.copy(old, path)
    with pytest.raises(LedgerTampered, match=r"ends at entry 21, but its counter .* has seen entry 22"):
        Ledger.open(path)


def test_a_fork_of_the_history_is_refused(path, tmp_path):
    """Two copies go on separately; both are whole, only one is what the counter has seen."""
    twin = tmp_path / "twin"
    twin.mkdir()
    for file in (path, path.with_name(path.name + ".counter")):
        shutil.copy(file, twin / file.name)
    for each, number in ((path, 70), (twin / path.name, 71)):
        with Ledger.open(each) as ledger:
            ledger.reserve(charge(number))
    shutil.copy(twin / path.name, path)
    with pytest.raises(LedgerTampered, match="the history was changed"):
        Ledger.open(path)


def test_a_counter_that_is_missing_damaged_old_or_foreign_is_refused(path, tmp_path):
    counter = path.with_name(path.name + ".counter")
    kept = counter.read_bytes()
    with Ledger.open(path) as ledger:
        fill(ledger, 1)
    with new_ledger(tmp_path / "foreign.sqlite") as ledger:
        foreign = ledger.counter.path.read_bytes()
    newest = counter.read_bytes()
    cases = {"the counter is an old copy": kept, "missing or damaged": bytes(12288), "of another ledger": foreign}
    for message, content in cases.items():
        counter.write_bytes(content)
        with pytest.raises(LedgerTampered, match=message):
            Ledger.open(path)
    counter.unlink()
    with pytest.raises(LedgerTampered, match="missing or damaged"):
        Ledger.open(path)
    counter.write_bytes(newest)
    Ledger.open(path).close()


def test_a_lost_ledger_is_not_made_anew(path):
    path.unlink()
    with pytest.raises(LedgerTampered, match="the ledger is gone"):
        Ledger.open(path)
    with pytest.raises(UsageError, match="a new one would forget what was spent"):
        Ledger.create(path, "hospital")
    assert not path.exists()


def test_a_missing_ledger_is_refused_with_the_command_that_makes_it(tmp_path):
    with pytest.raises(UsageError, match="Make one with: fedplat budget --init"):
        Ledger.open(tmp_path / "none.sqlite")
    assert list(tmp_path.iterdir()) == []


def test_a_creation_that_crashed_can_be_repeated(tmp_path):
    path = tmp_path / "ledger.sqlite"
    new = Ledger.create(path, "hospital")
    new.close()
    path.rename(tmp_path / ".ledger.sqlite.part")  # as if it had been killed before the rename
    Ledger.create(path, "hospital").close()


def test_another_sites_ledger_is_refused(path):
    with pytest.raises(UsageError, match="is the ledger of site 'hospital', not of 'clinic'"):
        Ledger.open(path, "clinic")


def test_an_existing_ledger_is_never_overwritten(path):
    content = path.read_bytes()
    with pytest.raises(UsageError, match="exists already"):
        Ledger.create(path, "hospital")
    assert path.read_bytes() == content


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "not a database": lambda content: b"hello " * 1000,
    "emptied": lambda content: b"",
    "half of it": lambda content: content[: len(content) // 2],
    "all but a page": lambda content: content[:-4096],
    "another database": lambda content: b"SQLite format 3\x00" + content[16:100],
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_damage_is_told_in_words(damage, path):
    content = damage(path.read_bytes())
    path.write_bytes(content)
    with pytest.raises(JobError) as found:
        Ledger.open(path)
    assert "damaged" in str(found.value) or "emptied" in str(found.value)
    assert path.read_bytes() == content  # evidence stays as it is


def test_random_bytes_flipped_never_change_a_balance_unnoticed(path):
    """A flip is noticed, or fell on a byte that means nothing (free space of a page)."""
    whole, rng = path.read_bytes(), random.Random(8)
    with Ledger.open(path) as ledger:
        right = ledger.balance(ACCOUNT), [entry.body for entry in ledger.history(ACCOUNT)]
    noticed = 0
    for _ in range(60):
        content = bytearray(whole)
        for _ in range(8):
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        path.write_bytes(content)
        try:
            with Ledger.open(path) as ledger:
                assert (ledger.balance(ACCOUNT), [entry.body for entry in ledger.history(ACCOUNT)]) == right
        except FedplatError:
            noticed += 1
    assert noticed > 20


def test_a_full_verification_names_the_head(path):
    with Ledger.open(path, verify=False) as ledger:
        assert ledger.verify() == ledger.head() and len(ledger.head().hash) == 64
        assert ledger.history(ACCOUNT)[2].body["identity"] == vars(ReleaseIdentity("job", 0, 0, "client-0"))
