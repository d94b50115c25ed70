"""`python -m fedplat` is `fedplat`."""

from fedplat.cli import main

main()
