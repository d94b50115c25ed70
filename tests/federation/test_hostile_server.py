"""What a server (or whoever sits in its place) can't make a site do. Real SuperLink, nginx, SuperNodes and agents."""

import io
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord

from client_app.audit_log import read_audit
from fedplat import wire
from fedplat.cli.operator import ready_for_sites, sign
from fedplat.cli.watch import lines_of
from fedplat.consortium.identity import SigningKey
from fedplat.consortium.signed_job import SignedJob
from fedplat.flower.control import empty_archive
from simulations.local_federation import LocalFederation
from tests.federation.requirements import needs_nginx
from tests.federation.rogue import rogue_server

pytestmark = [pytest.mark.slow, needs_nginx]
SITE = "site-1"


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalFederation]:
    folder = tmp_path_factory.mktemp("federation")
    policy = 'max_rounds = 50\nsigners = ["operator"]'
    with LocalFederation(folder, sites=1, policy=policy, environment={"OMP_NUM_THREADS": "1"}) as started:
        started.wait_until_online()
        yield started


@pytest.fixture
def job(tiny_job, federation, request):
    """A job of its own for each test: sites remember jobs."""
    seed = zlib.crc32(request.node.name.encode()) % 100_000
    settings = {"cohort__clients": 1, "cohort__fraction": 1.0, "job__rounds": 3, "job__seed": seed}
    return ready_for_sites(tiny_job(**settings), federation.operator)


def decisions(federation: LocalFederation) -> list[str]:
    return [entry["decision"] for entry in read_audit(federation.site(SITE).state_folder / "audit.jsonl")]


def hostile_archive(marker: Path) -> bytes:
    """An app whose every module leaves a mark when it is imported, under all names that could be imported."""
    content = io.BytesIO(empty_archive())
    code = f"open({str(marker)!r}, 'a').write(__name__ + chr(10))\napp = server = client = None\n"
    with zipfile.ZipFile(content, "a") as archive:
        for name in ("fedplat_signed_job", "client_app", "server_app", "fedplat", "sitecustomize"):
            archive.writestr(f"{name}.py", code)
            archive.writestr(f"{name}/__init__.py", code)
    return content.getvalue()


def test_nothing_of_an_uploaded_archive_runs(federation, job, tmp_path):
    marker = tmp_path / "ran"
    with rogue_server(federation, sign(job, federation.operator), hostile_archive(marker)) as server:
        reply = server.ask(SITE, server.request())
        assert reply.has_content() and wire.ARRAYS in reply.content
    assert not marker.exists()


def test_hyper_parameters_other_than_the_jobs_are_refused(federation, job):
    with rogue_server(federation, sign(job, federation.operator)) as server:
        for key, value in {
            "lr": 9.0,
            "local-epochs": 100,
            "proximal-mu": 0.5,
            "server-round": 2,
            "client": "../x",
        }.items():
            assert key in server.refusal(SITE, server.request(**{key.replace("-", "_"): value})), key


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"round": 0}, "none of this job's rounds"),
        ({"round": 4}, "none of this job's rounds"),
        ({"attempt": 3}, "attempt"),
        ({"attempt": 0}, "attempt"),
        ({"job": "0" * 64}, "another job"),
        ({"round": "1"}, "whole numbers"),
    ],
)
def test_an_identity_that_is_not_the_jobs_is_refused(federation, job, change, words):
    with rogue_server(federation, sign(job, federation.operator)) as server:
        assert words in server.refusal(SITE, server.request(**change))


def test_arrays_that_are_not_the_models_are_refused(federation, job):
    with rogue_server(federation, sign(job, federation.operator)) as server:
        name, first = next(iter(server.initial.items()))
        lying = server.request()
        arrays = wire.records(lying, ArrayRecord)[wire.ARRAYS]
        buffer = io.BytesIO()
        np.save(buffer, np.zeros(3, first.dtype))
        arrays[name] = Array(dtype=str(first.dtype), shape=first.shape, stype="numpy.ndarray", data=buffer.getvalue())
        cases = {
            "not the model's": server.request(server.initial | {"extra": first}),
            "is float64": server.request(server.initial | {name: first.astype(np.float64)}),
            "the model's is": server.request(server.initial | {name: first[:1]}),
            "not what it says": lying,
        }
        for words, content in cases.items():
            assert words in server.refusal(SITE, content), words
        extra = server.request()
        extra["more"] = ConfigRecord({"x": 1})
        assert "'more'" in server.refusal(SITE, extra)
        metrics = server.request()
        metrics["more"] = MetricRecord({"x": 1})
        assert "'more'" in server.refusal(SITE, metrics)
        assert "no 'query.secrets'" in server.refusal(SITE, server.request(), "query.secrets")


def test_one_identity_has_one_request_and_one_reply(federation, job):
    with rogue_server(federation, sign(job, federation.operator)) as server:
        first = server.ask(SITE, server.request())
        again = server.ask(SITE, server.request())
        for name, array in wire.records(first.content, ArrayRecord)[wire.ARRAYS].items():
            assert wire.records(again.content, ArrayRecord)[wire.ARRAYS][name].data == array.data
        assert decisions(federation)[-1] == "repeated"
        moved = {name: array + 1 for name, array in server.initial.items()}
        assert "asked for before with another model" in server.refusal(SITE, server.request(moved))


def test_a_giant_message_is_not_even_fetched(federation, job):
    with rogue_server(federation, sign(job, federation.operator)) as server:
        flood = {f"a{number}": np.full(1, number, np.float32) for number in range(200)}
        assert "more than the job's model" in server.refusal(SITE, server.request(flood))


def forged(original, federation, **changes: object) -> str:
    signed = SignedJob.parse(sign(original, federation.operator))
    return signed.model_copy(update=changes).text()


CASES = ["edited", "stranger", "unknown operator", "other consortium", "old", "future"]


@pytest.mark.parametrize("case", CASES)
def test_a_job_that_no_operator_signed_lately_is_refused(federation, job, case):
    kit = federation.operator
    other = job.model_copy(update={"local": job.local.model_copy(update={"lr": 0.9})})
    carried, words = {
        "edited": (forged(job, federation, job=other.canonical()), "signature is not"),
        "stranger": (SignedJob.sign(job, kit.consortium, kit.name, SigningKey.generate(), 1.8e9).text(), "signature"),
        "unknown operator": (forged(job, federation, operator="mallory"), "no operator"),
        "other consortium": (forged(job, federation, consortium="elsewhere"), "consortium 'elsewhere'"),
        "old": (SignedJob.sign(job, kit.consortium, kit.name, kit.signing_key(), 1.0).text(), "max_job_age_days"),
        "future": (SignedJob.sign(job, kit.consortium, kit.name, kit.signing_key(), 4e9).text(), "max_job_age_days"),
    }[case]
    with rogue_server(federation, carried) as server:
        assert words in server.refusal(SITE, server.request())
    assert decisions(federation)[-1] == "refused"


def test_a_run_without_a_signed_job_is_refused_by_site_and_server(federation, job):
    with rogue_server(federation, job.canonical(), job=job) as server:
        assert "no signed job" in server.refusal(SITE, server.request())
    with federation.control() as control:
        run_id = control.start_run(job.canonical())
        lines = list(lines_of(control, run_id, follow=True))
    assert any("no signed job" in line for line in lines)


def test_policy_refusals_name_their_rule(federation, tiny_job):
    common = {"cohort__clients": 1, "cohort__fraction": 1.0, "cohort__sites": (SITE,)}
    long = tiny_job(job__rounds=51, **common)
    with rogue_server(federation, sign(long, federation.operator)) as server:
        assert "policy.max_rounds" in server.refusal(SITE, server.request())
    elsewhere = tiny_job(**(common | {"cohort__sites": ("site-9",)}))
    with rogue_server(federation, sign(elsewhere, federation.operator)) as server:
        assert "policy.sites" in server.refusal(SITE, server.request())
    foreign = tiny_job(task__name="cancer", task__args={}, **common)
    with rogue_server(federation, sign(foreign, federation.operator)) as server:
        assert "no dataset" in server.refusal(SITE, server.request())
