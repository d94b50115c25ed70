"""Bad jobs: what is written → what the person reads. Every refusal is a UsageError that names the key."""

from pathlib import Path

import pytest

from fedplat.errors import UsageError, nearest, unknown_name
from fedplat.job import Job, default_job, load_job, parse_job
from fedplat.partition_spec import KINDS

BAD_FILES = {
    "unknown key, near a real one": ("[cohort]\nfractoin = 1", "unknown key 'cohort.fractoin'", "'cohort.fraction'"),
    "unknown key lists its section": ("[job]\nxyz = 1", "'job.xyz'", "Valid in [job]: name, seed, rounds"),
    "unknown key of a partitioner": ("[data.partition]\nalhpa = 1", "'data.partition.alhpa'", "'data.partition.alpha'"),
    "unknown key of a schedule": (
        "[local.schedule]\ngama = 0.5",
        "'local.schedule.gama'",
        "'local.schedule.gamma'",
    ),
    "unknown section": ("[cohrot]\nsize = 1", "unknown key 'cohrot'", "'cohort'"),
    "key in the wrong section": ("[cohort]\nlr = 1", "unknown key 'cohort.lr'", "did you mean 'local.lr'"),
    "key at the top": ("rounds = 3", "unknown key 'rounds'", "did you mean 'job.rounds'"),
    "section is a value": ("cohort = 3", "cohort", "got 3"),
    "above the range": ("[cohort]\nfraction = 2.0", "cohort.fraction must be ≤ 1", "got 2.0"),
    "not above zero": ("[local]\nlr = 0", "local.lr must be > 0", "got 0"),
    "below one": ("[job]\nrounds = 0", "job.rounds must be ≥ 1", "got 0"),
    "not below one": ("[data]\nholdout = 1", "data.holdout must be < 1", "got 1"),
    "partitioner out of range": ("[data.partition]\nalpha = 0", "data.partition.alpha must be > 0", "got 0"),
    "tuple element out of range": (
        "[data.partition]\nkind = 'capacity'\ncapacities = [1, -1]",
        "data.partition.capacities.1 must be > 0",
        "got -1",
    ),
    "infinite": ("[local]\nlr = inf", "local.lr", "finite"),
    "wrong type": ("[job]\nrounds = 'many'", "job.rounds", "got 'many'"),
    "true for a count": ("[job]\nrounds = true", "job.rounds", "got True"),
    "quoted number": ("[job]\nrounds = '3'", "job.rounds", "got '3'"),
    "quoted rate": ("[local]\nlr = '0.1'", "local.lr", "got '0.1'"),
    "text for a switch": ("[evaluation]\nserver = 'no'", "evaluation.server", "got 'no'"),
    "number for a switch": ("[evaluation]\nserver = 0", "evaluation.server", "got 0"),
    "fraction of a round": ("[job]\nrounds = 2.5", "job.rounds", "got 2.5"),
    "bad name": ("[job]\nname = '../evil'", "job.name", "'../evil'"),
    "bad checksum": ("[task]\ninit_sha256 = 'abc'", "task.init_sha256", "'abc'"),
    "unknown choice": ("[local]\noptimizer = 'sgdd'", "local.optimizer must be one of", "'sgdd'"),
    "unknown partitioner": ("[data.partition]\nkind = 'dirchlet'", "unknown partitioner 'dirchlet'", "'dirichlet'"),
    "partitioner without its list": ("[data.partition]\nkind = 'capacity'", "data.partition.capacities", "required"),
    "key of another partitioner": (
        "[data.partition]\nkind = 'iid'\nalpha = 1",
        "unknown key 'data.partition.alpha'",
        "alpha",
    ),
    "malformed": ("[cohort\nclients = 1", "not valid TOML", "line 1"),
    "same key twice": ("[job]\nseed = 1\nseed = 2\n", "not valid TOML", "line 3"),
    "cohort larger than federation": ("[cohort]\nclients = 5\nsize = 6", "size 6", "clients = 5"),
    "more replies than asked": ("[cohort]\nsize = 5\nmin_replies = 6", "min_replies 6", "cohort of 5"),
    "more replies than the fraction": ("[cohort]\nclients = 10\nmin_replies = 6", "min_replies 6", "cohort of 2"),
    "two limits": ("[local]\nepochs = 1\nsteps = 2", "give one of epochs, steps, seconds", "epochs and steps"),
    "momentum with adam": ("[local]\noptimizer = 'adam'\nmomentum = 0.9", "momentum belongs to sgd", "adam"),
    "client evaluation without holdout": ("[evaluation]\nclients = 0.5", "evaluation.clients", "data.holdout > 0"),
    "target without evaluation": ("[evaluation]\nserver = false\ntarget = 0.9", "evaluation.target", "server = true"),
    "patience without evaluation": ("[evaluation]\nserver = false\npatience = 3", "patience", "server = true"),
    "two proximal weights": (
        "[local]\nproximal_mu = 0.1\n[server]\nargs = { proximal_mu = 0.2 }",
        "local.proximal_mu",
        "server.args.proximal_mu",
    ),
    "NaN argument": ("[task]\nargs = { x = nan }", "task.args.x", "finite"),
    "NaN deep in an argument": ("[task]\nargs = { x = [1, { y = nan }] }", "task.args.x", "finite"),
    "infinite strategy argument": ("[server]\nargs = { eta = inf }", "server.args.eta", "finite"),
    "date argument": ("[task]\nargs = { d = 2020-01-01 }", "task.args.d", "JSON"),
}


@pytest.mark.parametrize(("content", "names", "says"), BAD_FILES.values(), ids=BAD_FILES.keys())
def test_bad_file_is_refused_and_the_message_names_file_and_key(
    tmp_path: Path, content: str, names: str, says: str
) -> None:
    path = tmp_path / "my-job.toml"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(UsageError) as refusal:
        load_job(path)
    message = str(refusal.value)
    assert message.startswith(f"{path}: ")
    assert names in message
    assert says in message
    assert path.read_text(encoding="utf-8") == content


@pytest.mark.parametrize(("content", "names", "says"), BAD_FILES.values(), ids=BAD_FILES.keys())
def test_parsing_text_refuses_what_loading_a_file_refuses(content: str, names: str, says: str) -> None:
    with pytest.raises(UsageError) as refusal:
        parse_job(content, "here")
    assert str(refusal.value).startswith("here: ")
    assert names in str(refusal.value)


def test_message_names_the_argument_and_not_pydantics_inner_path() -> None:
    with pytest.raises(UsageError) as refusal:
        parse_job("[task]\nargs = { x = nan }")
    assert "task.args.x.float" not in str(refusal.value)


def test_unknown_partitioner_lists_all_valid_ones() -> None:
    with pytest.raises(UsageError) as refusal:
        load_job(None, ["data.partition.kind=zipf"])
    assert all(kind in str(refusal.value) for kind in KINDS)


def test_every_problem_of_a_job_is_reported_at_once() -> None:
    with pytest.raises(UsageError) as refusal:
        parse_job("[job]\nrounds = 0\n[local]\nlr = -1\n[cohort]\nfractoin = 1")
    assert all(key in str(refusal.value) for key in ("job.rounds", "local.lr", "cohort.fractoin"))


def test_missing_file_says_how_to_write_one(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nowhere\.toml: no such job file\. .*fedplat job init"):
        load_job(tmp_path / "nowhere.toml")


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="can't be read"):
        load_job(tmp_path)
    latin = tmp_path / "latin.toml"
    latin.write_bytes(b"[job]\nname = '\xe9'\n")
    with pytest.raises(UsageError, match="can't be read"):
        load_job(latin)


@pytest.mark.parametrize("override", ["fraction=1", "cohort.fraction", "", "=", ".x=1", "cohort.=1", "cohort..x=1"])
def test_override_without_section_key_and_value_shows_an_example(override: str) -> None:
    with pytest.raises(UsageError, match=r"--set .*write section\.key=value, for example --set cohort\.fraction=0\.2"):
        load_job(None, [override])


@pytest.mark.parametrize(
    ("overrides", "fragment"),
    [
        (["job.name.x=1"], "'name' is a value, not a section"),
        (["job.rounds=abc"], "job.rounds"),
        (["cohort.fractoin=0.1"], "did you mean 'cohort.fraction'"),
        (["task.args.x=nan"], "task.args.x"),
        (["cohort.size=201"], "size 201"),
    ],
)
def test_bad_override_is_refused(overrides: list[str], fragment: str) -> None:
    with pytest.raises(UsageError) as refusal:
        load_job(None, overrides)
    assert fragment in str(refusal.value)
    assert "--set" in str(refusal.value)
    assert load_job(None) == default_job()


@pytest.mark.parametrize("text", ["{", "[]", '"job"', '{"job":{"rounds":0}}', '{"nope":1}', '{"local":{"lr":NaN}}'])
def test_bad_canonical_text_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError, match="job: "):
        Job.from_canonical(text)


def test_nearest_finds_the_typo_and_nothing_far_away() -> None:
    assert nearest("fractoin", ["fraction", "clients"]) == "fraction"
    assert nearest("zzz", ["fraction", "clients"]) is None
    assert unknown_name("strategy", "FedAvgg", ["Krum", "FedAvg"]) == (
        "unknown strategy 'FedAvgg' (did you mean 'FedAvg'?). Valid: FedAvg, Krum"
    )
