"""What `flwr run` uploads."""

from pathlib import Path

import pytest

from tests.federation.flower_processes import copy_app


@pytest.fixture
def app(tmp_path: Path) -> Path:
    return copy_app(tmp_path)
