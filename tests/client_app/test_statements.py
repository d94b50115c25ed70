"""What sites say of their ledgers to each other: a restored backup is caught, a liar catches nobody."""

import shutil
import time
from pathlib import Path

import pytest

from client_app.statements import NotYet, Statements
from fedplat.consortium.identity import SigningKey
from fedplat.consortium.roster import SiteEntry
from fedplat.errors import FedplatError, JobError, UsageError
from fedplat.job import Job
from privacy import plan_of
from privacy.ledger_heads import HEAD, STATEMENT, SignedHead, Statement, parse_statement
from privacy.site_budgets import Site, create_site_ledger, load_site, open_site_ledger
from tests.privacy.ledgers import ACCOUNT, charge
from tests.privacy.test_ledger_heads import KEYS, ROSTER, head, statement

AUDIT = "ab" * 32


class Party:
    """A site with a ledger of its own, that can be killed, set back and started again."""

    def __init__(self, folder: Path, name: str, policy: str = "") -> None:
        self.folder, self.name = folder / name, name
        self.folder.mkdir()
        (self.folder / "site.toml").write_text(
            f"[site]\nname = '{name}'\n[policy]\n{policy}\n"
            "[datasets.digits]\ntasks = ['digits']\nepsilon = 8.0\ndelta = 1e-6\n"
        )
        create_site_ledger(self.site)
        self.start()

    @property
    def site(self) -> Site:
        return load_site(self.folder / "site.toml")

    def start(self) -> Statements:
        self.statements = Statements(self.site, KEYS[self.name], self.folder / "heads.json")
        return self.statements

    def spend(self, number: int = 0, noise: float = 5.0) -> None:
        with open_site_ledger(self.site) as ledger:
            ledger.commit([ledger.reserve(charge(number, noise=noise))])

    def say(self) -> str:
        return self.statements.make(AUDIT)

    def hear(self, *told: str) -> list[str]:
        return self.statements.hear(told, ROSTER)

    def back_up(self) -> None:
        """Everything, as a backup of the machine would have it."""
        shutil.copytree(self.folder, self.folder.with_suffix(".backup"))

    def restore(self) -> None:
        shutil.rmtree(self.folder)
        shutil.copytree(self.folder.with_suffix(".backup"), self.folder)


@pytest.fixture
def parties(tmp_path: Path) -> dict[str, Party]:
    return {name: Party(tmp_path, name) for name in ("north", "south", "west")}


def test_a_statement_is_genuine_and_tells_the_newest_heads(parties):
    north, south = parties["north"], parties["south"]
    south.spend()
    assert north.hear(south.say()) == []
    north.spend()
    told = parse_statement(north.say())
    assert told is not None and told.is_genuine(ROSTER) and told.audit == AUDIT and told.budget is None
    with open_site_ledger(south.site) as ledger:
        about = told.about("south")
        assert about is not None and (about.seq, about.hash) == (ledger.head().seq, ledger.head().hash)
    about = told.about("north")
    assert about is not None and about.is_genuine(ROSTER)


def test_a_restored_backup_is_caught_by_what_any_one_peer_remembers(parties):
    north, south, west = parties.values()
    north.spend(1)
    north.back_up()
    north.spend(2)
    south.hear(north.say())
    west.hear(south.say())  # west never spoke to north
    north.restore()
    north.start()  # knows nothing yet
    with pytest.raises(JobError, match="restored backup"):
        north.hear(west.say())
    with pytest.raises(JobError, match="restored backup"):
        north.start()  # and stays refused: it was written down
    north.spend(3)
    north.spend(4)
    with pytest.raises(JobError, match="restored backup"):
        north.start()


def test_the_true_ledger_passes_whatever_old_statements_are_replayed(parties):
    north, south, _ = parties.values()
    said, relayed = [], []
    for number in range(3):
        north.spend(number)
        said.append(north.say())
        south.hear(said[-1])
        relayed.append(south.say())
    for order in (said + relayed, (said + relayed)[::-1]):
        assert north.start().hear(order, ROSTER) == []


def test_a_new_ledger_is_refused_once_a_peer_remembers_the_old_one(parties, tmp_path):
    north, south, _ = parties.values()
    north.spend()
    south.hear(north.say())
    shutil.rmtree(north.folder)
    fresh = Party(tmp_path, "north")
    with pytest.raises(JobError, match="other sites know another ledger"):
        fresh.hear(south.say())


def test_a_liar_about_others_makes_nobody_refuse(parties):
    """It may leave out heads and repeat old ones. A newer one needs the other site's signature."""
    north, south, _ = parties.values()
    north.spend()
    south.hear(north.say())
    known = parse_statement(south.say())
    assert known is not None
    true = known.about("north")
    assert true is not None
    lies = [
        head("north", 10**6, by="south"),
        head("north", 10**6, ledger="another", by="south"),
        true.model_copy(update={"seq": true.seq + 1}),
        true.model_copy(update={"hash": "ff" * 32}),
        true.model_copy(update={"ledger": "another"}),
        SignedHead(site="north", ledger=true.ledger, seq=true.seq + 1, hash="ff" * 32, signature=true.signature),
    ]
    for lie in lies:
        assert north.hear(statement("south", lie, time=time.time()).model_dump_json()) == []
    north.start()
    north.spend(2)


@pytest.mark.parametrize("told", ["", "junk", "[" * 100_000, "null", statement("north", by="south").model_dump_json()])
def test_what_is_no_genuine_statement_is_ignored(told, parties):
    assert parties["north"].hear(told) == []


def test_things_that_are_no_text_are_ignored(parties):
    assert parties["north"].statements.hear([1, 1.5, b"x", True], ROSTER) == []


def test_a_contradiction_is_an_alarm(parties):
    north = parties["north"]
    north.hear(statement("south", head("south", 4, fork=1)).model_dump_json())
    alarms = north.hear(statement("west", head("south", 4, fork=2)).model_dump_json())
    assert alarms == ["site 'south' has signed two different ledgers with 4 entries"]


# --- witnesses --------------------------------------------------------------------------------------


def meet(party: Party, other: Party) -> None:
    """The other hears of a party, and the party hears what the other says to that."""
    other.hear(party.say())
    party.hear(other.say())


def test_nothing_is_trained_before_enough_others_have_spoken_since_the_start(tmp_path):
    north, south, west = (Party(tmp_path, name, "witnesses = 2") for name in ("north", "south", "west"))
    meet(north, south)
    meet(north, west)
    old = [south.say(), west.say()]
    north.start()
    north.hear(*old)
    with pytest.raises(NotYet, match=r"policy\.witnesses: 0 of 2"):
        north.statements.require_witnesses(ROSTER)
    meet(north, south)
    north.hear(south.say(), north.say(), statement("west", by="south").model_dump_json())
    with pytest.raises(NotYet, match=r"policy\.witnesses: 1 of 2"):
        north.statements.require_witnesses(ROSTER)
    meet(north, west)
    north.statements.require_witnesses(ROSTER)
    north.start()  # a new start asks anew
    with pytest.raises(NotYet):
        north.statements.require_witnesses(ROSTER)


def test_a_fresh_statement_of_a_site_that_has_not_heard_of_this_one_confirms_nothing(tmp_path):
    """The server kept all that north ever said from south: south's word on north's ledger is worth nothing."""
    north, south = Party(tmp_path, "north", "witnesses = 1"), Party(tmp_path, "south")
    north.spend(1)
    north.back_up()
    north.spend(2)
    north.restore()
    north.start()
    for _ in range(3):
        north.hear(south.say())
        with pytest.raises(NotYet, match="0 of 1"):
            north.statements.require_witnesses(ROSTER)


def test_a_witness_that_knows_more_is_no_witness_but_an_alarm(tmp_path):
    north, south = Party(tmp_path, "north", "witnesses = 1"), Party(tmp_path, "south")
    north.spend(1)
    north.back_up()
    north.spend(2)
    south.hear(north.say())
    north.restore()
    north.start()
    south.hear(north.say())
    with pytest.raises(JobError, match="restored backup"):
        north.hear(south.say())
    with pytest.raises(NotYet):
        north.statements.require_witnesses(ROSTER)


def test_a_liar_that_has_heard_of_this_site_neither_confirms_nor_stops_it(tmp_path):
    north = Party(tmp_path, "north", "witnesses = 1")
    north.spend()
    nonce = north.statements._nonce
    for heads in ((), (head("north", 10**6, by="south"),)):
        unsigned = Statement(site="south", time=time.time(), heads=heads, audit=AUDIT, heard={"north": nonce})
        lie = unsigned.model_copy(update={"signature": KEYS["south"].sign(STATEMENT, unsigned.body())})
        assert north.hear(lie.model_dump_json()) == []
        with pytest.raises(NotYet, match="0 of 1"):
            north.statements.require_witnesses(ROSTER)


def test_a_site_without_a_ledger_is_confirmed_by_who_knows_of_none(tmp_path):
    north, south = Party(tmp_path, "north", "witnesses = 1"), Party(tmp_path, "south")
    for file in north.folder.glob("ledger*"):
        file.unlink()
    north.start()
    meet(north, south)
    north.statements.require_witnesses(ROSTER)


def test_sites_that_all_wait_for_witnesses_do_not_wait_for_ever(tmp_path):
    parties = [Party(tmp_path, name, "witnesses = 2") for name in ("north", "south", "west")]
    for _ in range(3):  # a server that relays, while all of them answer that they can't yet
        said = [party.say() for party in parties]
        for party in parties:
            party.hear(*said)
    for party in parties:
        party.statements.require_witnesses(ROSTER)


def test_an_older_statement_does_not_take_back_what_was_heard(tmp_path):
    north, south = Party(tmp_path, "north"), Party(tmp_path, "south")
    old = north.say()
    north.start()
    south.hear(north.say())
    south.hear(old)
    told = parse_statement(south.say())
    assert told is not None and told.heard == {"north": north.statements._nonce}


def test_the_cost_of_hearing_is_bounded(parties, monkeypatch):
    checked: list[str] = []
    true = Statement.is_genuine
    monkeypatch.setattr(Statement, "is_genuine", lambda self, roster: checked.append(self.site) or true(self, roster))
    south = parties["south"].say()
    parties["north"].hear(*[south] * 5000, *["x"] * 5000)
    assert checked == ["south"]
    parties["north"].hear(south)
    assert checked == ["south"]  # the very same again
    forged = [statement("west", time=float(n), by="south").model_dump_json() for n in range(400)]
    parties["north"].hear(*forged)
    assert len(checked) <= 257


def test_a_statement_stays_small_among_many_sites(tmp_path):
    keys = {f"{'s' * 58}{n:04d}": SigningKey.generate() for n in range(250)}
    entries = {name: SiteEntry(identity=key.public, node="") for name, key in keys.items()}
    roster = ROSTER.model_copy(update={"sites": ROSTER.sites | entries})
    north = Party(tmp_path, "north")
    for name, key in keys.items():
        one = SignedHead(site=name, ledger="l" * 64, seq=2**62, hash="ab" * 32)
        one = one.model_copy(update={"signature": key.sign(HEAD, one.body())})
        told = Statement(site=name, time=1.0, heads=(one,), audit=AUDIT, nonce="ab" * 16)
        told = told.model_copy(update={"signature": key.sign(STATEMENT, told.body())})
        north.statements.hear([told.model_dump_json()], roster)
    said = parse_statement(north.say())
    assert said is not None and said.is_genuine(roster) and said.about("north") is not None
    assert len(said.heads) == 101 and set(said.heard) == {one.site for one in said.heads} - {"north"}


@pytest.mark.parametrize("wanted", [0, 1, 2, 99])
def test_no_more_witnesses_are_wanted_than_there_are_others(wanted, tmp_path):
    parties = [Party(tmp_path, name, f"witnesses = {wanted}") for name in ("north", "south", "west")]
    north, *others = parties
    for heard, other in enumerate(others):
        if heard < min(wanted, 2):
            with pytest.raises(NotYet):
                north.statements.require_witnesses(ROSTER)
        else:
            north.statements.require_witnesses(ROSTER)
        meet(north, other)
    north.statements.require_witnesses(ROSTER)


def test_not_yet_is_no_refusal():
    assert issubclass(NotYet, FedplatError) and not issubclass(NotYet, UsageError)


# --- budgets ----------------------------------------------------------------------------------------


def test_a_budget_is_shown_only_where_the_site_wants_it(tmp_path):
    shy, open_one = Party(tmp_path, "north"), Party(tmp_path, "south", "show_budget = true")
    for party, shown in ((shy, False), (open_one, True)):
        party.spend()
        told = parse_statement(party.say())
        assert told is not None and (told.budget is not None) == shown
        if told.budget is not None:
            assert 0 < told.budget[ACCOUNT] < 8.0


def test_a_site_without_a_ledger_says_so_by_saying_nothing(tmp_path):
    party = Party(tmp_path, "north")
    for file in party.folder.glob("ledger*"):
        file.unlink()
    told = parse_statement(party.start().make(AUDIT))
    assert told is not None and told.about("north") is None and told.is_genuine(ROSTER)


def test_a_job_whose_budget_is_used_up_is_refused(tiny_job, parties):
    job: Job = tiny_job(privacy__unit="sample", privacy__noise_multiplier=2.0, privacy__sample_rate=0.2)
    north, plan = parties["north"], plan_of(job)
    assert plan is not None
    north.statements.require_budget(job, plan)
    north.spend(noise=1.0)
    north.statements.require_budget(job, plan)
    file = north.folder / "site.toml"
    file.write_text(file.read_text().replace("epsilon = 8.0", "epsilon = 5.0"))  # less than was spent
    with pytest.raises(UsageError, match="nothing is left of its budget"):
        north.start().require_budget(job, plan)


def test_a_statement_signed_by_another_key_of_the_same_name_is_foreign(parties):
    stranger = SigningKey.generate()
    unsigned = Statement(site="south", time=time.time(), heads=(), audit=AUDIT)
    forged = unsigned.model_copy(update={"signature": stranger.sign(STATEMENT, unsigned.body())})
    north = parties["north"]
    north.hear(forged.model_dump_json())
    assert north.statements._witnesses == set()
