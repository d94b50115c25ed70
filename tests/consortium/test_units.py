"""systemd and Kubernetes read what we wrote, and nothing has more power than it needs."""

import configparser
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from fedplat.consortium.units import SERVER_USER, SITE_CAPABILITIES
from tests.consortium.conftest import Consortium

HARDENING = {"NoNewPrivileges": "yes", "ProtectSystem": "strict", "UMask": "0077", "PrivateTmp": "yes"}


def _service(path: Path) -> configparser.SectionProxy:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(path.read_text())
    return unit["Service"]


def test_units_are_hardened(consortium: Consortium) -> None:
    units = {path.name: _service(path) for path in consortium.kits.rglob("*.service")}
    assert set(units) == {"fedplat-server.service", "fedplat-site-north.service", "fedplat-site-south.service"}
    for unit in units.values():
        assert HARDENING.items() <= dict(unit).items()
    server, site = units["fedplat-server.service"], units["fedplat-site-north.service"]
    assert server["User"] == SERVER_USER and server["CapabilityBoundingSet"] == ""
    assert site["CapabilityBoundingSet"].split() == [f"CAP_{name}" for name in SITE_CAPABILITIES]
    assert site["ReadWritePaths"] == "/etc/fedplat/alpha/north"


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


@pytest.mark.parametrize(("name", "file", "root"), [("north", "site.yaml", True), ("server", "server.yaml", False)])
def test_containers_have_no_power_that_they_do_not_need(
    consortium: Consortium, name: str, file: str, root: bool
) -> None:
    objects = yaml.safe_load_all((consortium.kit(name) / "kubernetes" / file).read_text())
    pod = next(made for made in objects if made["kind"] == "Deployment")["spec"]["template"]["spec"]
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"].get("runAsNonRoot", False) is not root
    for container in (*pod["initContainers"], *pod["containers"]):
        context = container["securityContext"]
        assert context["allowPrivilegeEscalation"] is False and context["readOnlyRootFilesystem"] is True
        assert context["capabilities"]["drop"] == ["ALL"]
        assert context["capabilities"].get("add", []) == (list(SITE_CAPABILITIES) if root else [])


@pytest.mark.parametrize("name", ["A_b", "x" * 63, "a-"])
def test_any_party_s_name_makes_a_name_for_kubernetes(tmp_path: Path, name: str) -> None:
    world = Consortium(tmp_path / "w", sites=(name,))
    world.provision()
    for made in yaml.safe_load_all((world.kit(name) / "kubernetes" / "site.yaml").read_text()):
        label = made["metadata"]["name"]
        assert len(label) <= 63 and label.replace("-", "").isalnum() and label == label.lower() and label[-1] != "-"
