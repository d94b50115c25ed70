"""What `flwr run` uploads."""

import shutil
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PARTS = ("pyproject.toml", "README.md", "LICENSE", "fedplat", "server_app", "client_app", "privacy", "simulations")


@pytest.fixture
def app(tmp_path: Path) -> Path:
    """A copy of what a Flower user would have, without tests, virtual environment and runs."""
    folder = tmp_path / "app"
    folder.mkdir()
    for part in PARTS:
        source = REPOSITORY / part
        if source.is_dir():
            shutil.copytree(source, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder / part)
    return folder
