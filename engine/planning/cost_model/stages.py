"""How blocks are shared among pipeline stages, what a rank holds meanwhile, and how long it waits. Closed forms.

p ranks, m microbatches, v stages a rank; the bubbles are those of ``engine.parallel.pipeline.schedule.kinds``.
"""

from dataclasses import dataclass
from math import ceil

from engine.planning.cost_model.layout import TrainingLayout
from engine.planning.cost_model.workload import Workload

SPLIT = ("zb-h1", "zb-v", "dualpipe-v")
"""Schedules that compute weight gradients when nothing else can be done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageShare:
    """What the rank that computes longest has of the model."""

    blocks: float
    heads: float
    """1 with the head, 0 without."""
    outer_parameters: float
    """Of embedding or head."""


def slowest(work: Workload, pp: int, block: float, head: float, balanced: bool = True) -> StageShare:
    """The share of the slowest pipeline rank, for seconds of a block and of the head."""
    outer = work.outer_parameters
    if pp == 1:
        return StageShare(blocks=work.blocks, heads=1.0, outer_parameters=outer)
    one = outer / 2
    if not balanced:
        return StageShare(blocks=work.blocks / pp, heads=1.0, outer_parameters=one)
    fewest, best = ceil(work.blocks / pp), float("inf")
    found = StageShare(blocks=fewest, heads=0.0, outer_parameters=one)
    for others in range(max(1, work.blocks // pp), work.blocks // max(1, pp - 1) + 1):
        last = work.blocks - others * (pp - 1)
        if last < 0:
            break
        longest = max(others * block, last * block + head)
        if longest < best:
            best = longest
            heads = float(last * block + head >= others * block)
            found = StageShare(blocks=last if heads else others, heads=heads, outer_parameters=one)
    return found


def idle_over_useful(layout: TrainingLayout) -> float:
    """Idle time of the pipeline for each second that a rank computes."""
    p, m, v = layout.pp, layout.microbatches, layout.virtual
    if p == 1:
        return 0.0
    if m < p and layout.schedule != "gpipe":
        v = 1  # the ranks wait for each other in every round
    parts = {"gpipe": 1.0, "1f1b": 1.0, "zb-h1": 3.0 * v, "zb-v": 6.0, "dualpipe-v": 6.0}
    return (p - 1) / (m * parts.get(layout.schedule, float(v)))


def microbatches_held(layout: TrainingLayout) -> float:
    """Of a rank's whole slice of the model, on the fullest rank."""
    p, m, v = layout.pp, layout.microbatches, layout.virtual
    if layout.schedule in ("gpipe", "looped-bfs"):
        return float(m)
    if p == 1:
        return 1.0
    extra = {"interleaved": (p - 1) / v, "dualpipe-v": 0.5}
    return min(float(m), p + extra.get(layout.schedule, 0.0))
