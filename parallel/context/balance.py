"""Attention work of context ranks: pairs of a query and a key that it sees. Pure arithmetic."""

from typing import NamedTuple

import numpy as np

from engine.parallel.context.cuts import zigzag


class WorkBalance(NamedTuple):
    """Pairs of a query and a key that each context rank computes in a head, for one row under a causal mask."""

    pairs: tuple[int, ...]

    @property
    def most_over_mean(self) -> float:
        """Pairs of the rank with the most, divided by the mean of all ranks."""
        return max(self.pairs) * len(self.pairs) / sum(self.pairs)


def causal_pairs(positions: np.ndarray) -> int:
    """Returns the pairs of queries at ``positions`` with the keys that they see: their own and all before it."""
    return int(positions.sum()) + len(positions)


def causal_balance(length: int, ranks: int, unit: int = 1) -> WorkBalance:
    """Returns the work of context ranks for a row of ``length`` tokens in zig-zag chunks, multiples of ``unit``."""
    return WorkBalance(tuple(causal_pairs(held) for held in zigzag(length, ranks, unit).ranks))
