"""The batch that DeepSpeed's ``elasticity`` chooses: rows that as many numbers of GPUs as possible divide evenly."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from engine.config.rules import Flag, Int, ListOf, Problems

_SIZE = Int(low=1)
_HIGHLY_COMPOSITE = (
    1, 2, 4, 6, 12, 24, 36, 48, 60, 120, 180, 240, 360, 720, 840, 1260, 1680, 2520, 5040, 7560, 10080, 15120, 20160,
    25200, 27720, 45360, 50400, 55440, 83160, 110880, 166320, 221760, 277200, 332640, 498960, 554400, 665280, 720720,
)  # fmt: skip
"""Numbers with more divisors than any smaller one."""


class ElasticBatch(NamedTuple):
    """Rows of a step, and of a microbatch."""

    rows: int
    micro: int


def elastic_batch(section: Mapping[str, Any], problems: Problems) -> ElasticBatch | None:
    """The batch of an ``elasticity`` section; None if a value is wrong, which is then noted.

    Candidates are multiples of each microbatch, and of their common multiple, by a number with many divisors. The one
    wins that most numbers of GPUs divide into whole microbatches. The smallest microbatch is taken, which divides the
    batch for every one of these numbers.
    """
    most = _read(_SIZE, section, "max_train_batch_size", 2000, problems)
    micros = _read(ListOf(each=_SIZE, noun="a list of rows"), section, "micro_batch_sizes", [2, 4, 6], problems)
    low, high = (_read(_SIZE, section, *part, problems) for part in (("min_gpus", 1), ("max_gpus", 10000)))
    larger = _read(Flag(), section, "prefer_larger_batch", True, problems)
    if micros is not None and not micros:
        problems.add("elasticity.micro_batch_sizes", "an empty list; give the rows that a microbatch may have.")
    if most is None or not micros or low is None or high is None or larger is None:
        return None
    if min(micros) > most:
        problems.add("elasticity.max_train_batch_size", f"{most} is less than all of micro_batch_sizes; give more.")
        return None
    candidates = {_multiple(base, most) for base in (*micros, math.lcm(*micros)) if base <= most}
    counted = {rows: len(set(_worlds(rows, micros, low, high))) for rows in candidates}
    rows = max(candidates, key=lambda rows: (counted[rows], rows if larger else -rows))
    fitting = [micro for micro in sorted(micros) if rows % micro == 0]
    return ElasticBatch(rows, fitting[0])


def _read(rule: Any, section: Mapping[str, Any], key: str, default: object, problems: Problems) -> Any:
    return rule.read(section.get(key, default), f"elasticity.{key}", problems)


def _multiple(base: int, most: int) -> int:
    """The largest multiple of ``base`` up to ``most`` by a highly composite number."""
    return base * max(number for number in _HIGHLY_COMPOSITE if number <= most // base)


def _worlds(rows: int, micros: Sequence[int], low: int, high: int) -> Iterable[int]:
    """Numbers of GPUs that divide the batch into whole microbatches."""
    for micro in micros:
        if rows % micro == 0:
            yield from (gpus for gpus in range(low, min(high, rows // micro) + 1) if rows // micro % gpus == 0)
