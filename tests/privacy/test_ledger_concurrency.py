"""Many processes spend from one budget at once: together never more than it, and no grant is lost."""

from collections.abc import Callable
from pathlib import Path

from fedplat.errors import UsageError
from privacy.ledger import BudgetExceeded, Ledger
from tests.privacy.ledgers import ACCOUNT, charge, new_ledger, processes

PROCESSES, TRIES = 8, 25


def spend(start, results, path: Path, job: str, tries: int) -> None:
    """Ask so often; half of what is granted is committed."""
    ledger, tokens, refused = Ledger.open(path), [], 0
    start.wait()
    for number in range(tries):
        try:
            reservation = ledger.reserve(charge(number, job=job))
        except BudgetExceeded:
            refused += 1
            continue
        tokens.append(reservation.token)
        if number % 2:
            ledger.commit([reservation])
    results.put((tokens, refused))


def create(start, results, path: Path) -> None:
    start.wait()
    try:
        Ledger.create(path, "hospital").close()
        results.put("made")
    except UsageError as error:
        results.put("refused" if "exists already" in str(error) else str(error))


def race(target: Callable[..., None], arguments: list[tuple]) -> list:
    """Let processes go at the same moment; what each of them found."""
    context = processes()
    start, results = context.Barrier(len(arguments)), context.Queue()
    running = [context.Process(target=target, args=(start, results, *each)) for each in arguments]
    for process in running:
        process.start()
    found = [results.get(timeout=120) for _ in running]
    for process in running:
        process.join()
    assert [process.exitcode for process in running] == [0] * len(running)
    return found


def test_processes_together_never_exceed_the_budget_and_every_grant_is_there(tmp_path):
    path = tmp_path / "ledger.sqlite"
    new_ledger(path).close()
    results = race(spend, [(path, f"job-{i}", TRIES) for i in range(PROCESSES)])
    granted = [token for tokens, _ in results for token in tokens]
    with Ledger.open(path, "hospital") as ledger:
        balance = ledger.balance(ACCOUNT)
        written = [entry.body["token"] for entry in ledger.history(ACCOUNT) if entry.kind == "reserve"]
    assert sorted(granted) == sorted(written) and len(set(written)) == len(written)
    assert len(granted) + sum(refused for _, refused in results) == PROCESSES * TRIES
    assert balance.rdp_spent <= balance.rdp_capacity
    assert balance.rdp_spent + 6.0 / (2 * 5.0**2) > balance.rdp_capacity  # and nothing was left that fits
    assert balance.releases == len(granted) == 48


def test_one_of_several_creators_wins_and_its_ledger_is_whole(tmp_path):
    path = tmp_path / "ledger.sqlite"
    assert sorted(race(create, [(path,)] * 3)) == ["made", "refused", "refused"]
    with Ledger.open(path, "hospital") as ledger:
        assert ledger.verify().seq == 1


def test_a_reader_verifies_while_others_write(tmp_path):
    path = tmp_path / "ledger.sqlite"
    new_ledger(path).close()
    context = processes()
    start, results = context.Barrier(1), context.Queue()
    writer = context.Process(target=spend, args=(start, results, path, "job", 60))
    writer.start()
    seen = []
    while writer.is_alive():
        with Ledger.open(path, readonly=True) as ledger:
            seen.append(ledger.head().seq)
    assert writer.exitcode == 0 and len(results.get()[0]) == 48
    assert seen == sorted(seen)
