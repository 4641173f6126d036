"""Fits a GPU's factors within bounds by least squares of the logarithmic errors of the published rows."""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from benchmarks.planning.published import PublishedRow
from engine.planning.cost_model.hardware import ReachedShares

BOUNDS: Mapping[str, tuple[float, float]] = MappingProxyType(
    {
        "product": (0.5, 0.85), "product_half": (50.0, 900.0), "fp8": (0.25, 0.8), "attention": (0.2, 0.7),
        "memory": (0.6, 0.9), "link": (0.5, 0.85), "network": (0.5, 0.9), "overlap": (0.5, 0.9), "step": (0.01, 0.1),
    }
)  # fmt: skip
"""Plausible bounds of each factor."""


def fit(rows: Sequence[PublishedRow], start: ReachedShares, rounds: int = 4000, seed: int = 0) -> ReachedShares:
    """Fits the factors by random steps of shrinking size; improvements are accepted. Factors without data drift."""
    draw, best, width = random.Random(seed), start, 0.3
    least = loss(rows, best)
    for _ in range(rounds):
        changes = {name: _moved(getattr(best, name), name, width, draw) for name in BOUNDS if draw.random() < 0.5}
        tried = replace(best, **changes)
        if (now := loss(rows, tried)) < least:
            best, least = tried, now
        width = max(0.01, width * 0.999)
    return best


def loss(rows: Sequence[PublishedRow], reached: ReachedShares) -> float:
    """Returns the sum of squared logarithms of prediction over published figure."""
    return sum(math.log(row.predict(reached)[0] / row.published) ** 2 for row in rows)


def _moved(value: float, name: str, width: float, draw: random.Random) -> float:
    low, high = BOUNDS[name]
    return min(high, max(low, value + draw.gauss(0, width) * (high - low)))
