"""A provisioned consortium in a temporary directory, and ways to change it."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from fedplat.consortium.issued import Issued
from fedplat.consortium.kits import Provisioned, provision
from fedplat.consortium.spec import load_spec

SPEC = """
[consortium]
name = "{name}"
[server]
host = "127.0.0.1"
port = {port}
names = ["fl.example.org"]
"""


@dataclass
class Consortium:
    """consortium.toml and the kits that were made from it."""

    folder: Path
    name: str = "alpha"
    port: int = 9443
    sites: tuple[str, ...] = ("north", "south")
    operators: tuple[str, ...] = ("olga",)
    public: tuple[str, ...] = ()
    """Parties that bring a bundle of their own, NAME.public.json beside consortium.toml."""

    def provision(self, **changes: object) -> Provisioned:
        self.folder.mkdir(parents=True, exist_ok=True)
        text = SPEC.format(name=self.name, port=self.port)
        for kind, names in (("sites", self.sites), ("operators", self.operators)):
            for name in names:
                bundle = f'public = "{name}.public.json"\n' if name in self.public else ""
                text += f'[[{kind}]]\nname = "{name}"\n{bundle}'
        (self.folder / "consortium.toml").write_text(text)
        spec = load_spec(self.folder / "consortium.toml")
        return provision(spec, self.kits, lambda name: f"# rules of {name}\n", **changes)  # type: ignore[arg-type]

    @property
    def kits(self) -> Path:
        return self.folder / "kits"

    def kit(self, name: str) -> Path:
        folders = (self.kits / "sites" / name, self.kits / "operators" / name, self.kits / name)
        return next(folder for folder in folders if folder.exists())

    def issued(self) -> Issued:
        return Issued.load(self.kits / "authority" / "issued.json", self.name)

    def files(self) -> dict[str, bytes]:
        """Every file of every kit."""
        return {str(f.relative_to(self.kits)): f.read_bytes() for f in self.kits.rglob("*") if f.is_file()}


@pytest.fixture
def consortium(tmp_path: Path) -> Consortium:
    made = Consortium(tmp_path / "alpha")
    made.provision()
    return made
