"""How Flower's own programs are started: from our installation, quiet, and offline."""

import sys
from pathlib import Path


def flower_command(program: str) -> list[str]:
    """A Flower program of this very environment, whatever the PATH says."""
    return [str(Path(sys.executable).parent / program)]


def quiet_environment(home: Path) -> dict[str, str]:
    """No telemetry, no update checks, no installs at run time, and a home of its own."""
    return {
        "FLWR_HOME": str(home),
        "HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    }
