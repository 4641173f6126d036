"""Scaling benchmark as a script path, which ``trine launch`` needs; it cannot start a module."""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).parents[2])  # not this folder: the benchmarks are no part of the installed package

from benchmarks.scaling.command import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
