"""Times contenders of a benchmark in interleaved rounds."""

import random
import time
from collections.abc import Callable, Mapping
from statistics import median

Work = Callable[[], object]
"""Function that runs one turn of a contender."""


def medians(works: Mapping[str, Work], rounds: int) -> dict[str, float]:
    """Returns the median seconds of each contender, in random order per round; the first round does not count."""
    spent: dict[str, list[float]] = {name: [] for name in works}
    order = list(works)
    for turn in range(rounds + 1):
        random.Random(turn).shuffle(order)
        for name in order:
            began = time.perf_counter()
            works[name]()
            if turn:
                spent[name].append(time.perf_counter() - began)
    return {name: median(values) for name, values in spent.items()}
