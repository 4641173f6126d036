"""The benchmark as a script, which ``trine launch`` starts on every rank: it takes a path, and no module."""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).parents[2])  # not this folder: the benchmarks are no part of the installed package

from benchmarks.scaling.command import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
