"""fedplat: one model from data that may not leave its site.

This room holds what every other room shares: the job file, tasks, partitioning, the run
directory with its events, and (in `fedplat.cli`, which alone may import everything) the command line.
"""

__version__ = "0.1.0"
