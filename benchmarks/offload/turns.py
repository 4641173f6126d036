"""Contenders of a benchmark in turns."""

import random
import time
from collections.abc import Callable, Mapping
from statistics import median

Work = Callable[[], object]
"""One turn."""


def medians(works: Mapping[str, Work], rounds: int) -> dict[str, float]:
    """Median seconds of each, in turns of a new order; the first turn is not counted."""
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
