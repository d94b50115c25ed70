"""Kits change all at once or not at all, whatever the moment of a crash.

New files of a kit are first written to a hidden directory. Then `issued.json` is replaced, which is the moment at which
the change happened; then the files move into the kit, the certificate last. What is still staged when provisioning
starts again belongs to a change that happened if its certificate is the current one: it is finished. Else it is
dropped.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path

from fedplat.consortium.authority import load_certificate, serial_text
from fedplat.consortium.issued import IssuedParty
from fedplat.files import sync_directory, write_file

CERTIFICATES = ("tls.crt", "server.crt")
FOLDERS = {"site": "sites", "operator": "operators"}
PRIVATE_DIRECTORY = 0o700


def kit_folder(out: Path, name: str, role: str) -> Path:
    return out / FOLDERS[role] / name if role in FOLDERS else out / name


def make_private(folder: Path) -> Path:
    folder.mkdir(mode=PRIVATE_DIRECTORY, parents=True, exist_ok=True)
    folder.chmod(PRIVATE_DIRECTORY)
    return folder


class Staging:
    """The kits that are being written."""

    def __init__(self, out: Path) -> None:
        self._out, self._root = out, out / ".staged"

    def open(self, name: str) -> Path:
        """An empty private directory for the new files of one kit."""
        folder = self._root / name
        shutil.rmtree(folder, ignore_errors=True)
        make_private(self._root)
        return make_private(folder)

    def install(self, parties: Mapping[str, IssuedParty]) -> None:
        """Move every staged kit that was issued to its place, and drop the others."""
        if not self._root.exists():
            return
        for staged in sorted(self._root.iterdir()):
            party = parties.get(staged.name)
            if party is not None and _serial(staged) == party.serial:
                _move_into(staged, kit_folder(self._out, staged.name, party.role), party)
        shutil.rmtree(self._root)


def _serial(staged: Path) -> str | None:
    """Which certificate is staged; None if the kit was never finished, or is installed already."""
    found = [staged / name for name in CERTIFICATES if (staged / name).exists()]
    return serial_text(load_certificate(found[0])) if found else None


def _move_into(staged: Path, kit: Path, party: IssuedParty) -> None:
    make_private(kit.parent)
    make_private(kit)
    suffix = f".old-{party.revoked_serials[-1]}" if party.revoked_serials else ".old"
    files = [file for file in sorted(staged.rglob("*")) if file.is_file()]
    for file in sorted(files, key=lambda f: f.name in CERTIFICATES):
        target = kit / file.relative_to(staged)
        make_private(target.parent)
        if target.exists():
            if is_the_partys(target.relative_to(kit)):
                continue
            if target.name != "ca.crt":
                target.rename(target.with_name(target.name + suffix))
        file.rename(target)
    sync_directory(kit)


def is_the_partys(file: Path) -> bool:
    """Configuration belongs to the party once it is written: it may have been edited."""
    return file.suffix in (".toml", ".sh", ".service", ".yaml")


def refresh(path: Path, content: bytes) -> None:
    """Write a file into a kit that still exists, if that changes it."""
    if path.parent.is_dir() and not (path.is_file() and path.read_bytes() == content):
        write_file(path, content)
