"""systemd and Kubernetes read what we wrote, and the SuperNode gets nothing of the site but its node key."""

import configparser
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from fedplat.consortium.units import AGENT_USER, NODE_USER
from tests.consortium.conftest import Consortium

HARDENING = {"NoNewPrivileges": "yes", "ProtectSystem": "strict", "CapabilityBoundingSet": "", "UMask": "0077"}


def _service(path: Path) -> configparser.SectionProxy:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(path.read_text())
    return unit["Service"]


def test_units_are_hardened_and_run_as_different_users(consortium: Consortium) -> None:
    units = {path.name: _service(path) for path in consortium.kits.rglob("*.service")}
    for unit in units.values():
        assert HARDENING.items() <= dict(unit).items()
    agent, node = units["fedplat-site-north.service"], units["fedplat-supernode-north.service"]
    assert (agent["User"], node["User"]) == (AGENT_USER, NODE_USER)
    assert "ReadWritePaths" in agent and "ReadWritePaths" not in node
    assert node["InaccessiblePaths"] == "-/etc/fedplat/alpha/north"


def test_systemd_accepts_the_units(consortium: Consortium) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not installed")
    units = [str(path) for path in consortium.kits.rglob("*.service")]
    done = subprocess.run([analyze, "verify", *units], capture_output=True, text=True)
    assert not [line for line in done.stderr.splitlines() if "fedplat" in line and "Unknown" in line], done.stderr


def test_manifests_are_kubernetes_objects(consortium: Consortium) -> None:
    manifests = list(consortium.kits.rglob("*.yaml"))
    assert len(manifests) == 3
    for path in manifests:
        objects = list(yaml.safe_load_all(path.read_text()))
        assert all({"apiVersion", "kind", "metadata", "spec"} <= set(made) for made in objects)
        names = [made["metadata"]["name"] for made in objects]
        assert all(name == name.lower() and len(name) <= 63 for name in names)


def test_the_supernode_s_container_mounts_nothing_of_the_kit_but_its_node_key(consortium: Consortium) -> None:
    objects = yaml.safe_load_all((consortium.kit("north") / "kubernetes" / "site.yaml").read_text())
    pod = next(made for made in objects if made["kind"] == "Deployment")["spec"]["template"]["spec"]
    agent, node = pod["containers"]
    users = {container["securityContext"]["runAsUser"] for container in (agent, node)}
    assert len(users) == 2
    assert {mount["name"] for mount in node["volumeMounts"]} == {"node", "flower"}
    for container in (*pod["initContainers"], agent, node):
        assert container["securityContext"]["allowPrivilegeEscalation"] is False


@pytest.mark.parametrize("name", ["A_b", "x" * 63, "a-"])
def test_any_party_s_name_makes_a_name_for_kubernetes(tmp_path: Path, name: str) -> None:
    world = Consortium(tmp_path / "w", sites=(name,))
    world.provision()
    for made in yaml.safe_load_all((world.kit(name) / "kubernetes" / "site.yaml").read_text()):
        label = made["metadata"]["name"]
        assert len(label) <= 63 and label.replace("-", "").isalnum() and label == label.lower() and label[-1] != "-"
