"""The command line. `fedplat --help` must be instant: torch and Flower are imported only by what needs them."""

import sys


def main() -> None:
    """Run the command and turn errors meant for people into one line and an exit code."""
    from fedplat.cli.root import app
    from fedplat.errors import FedplatError

    try:
        app()
    except FedplatError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(error.exit_code)
    except OSError as error:
        sys.stderr.write(f"error: {error.filename or 'input/output'}: {error.strerror or error}\n")
        sys.exit(1)
