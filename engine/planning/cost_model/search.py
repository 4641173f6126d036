"""Search over all layouts of a number of ranks: closed-form estimates for each, then whole plans for the best.

1,024 ranks have some thousands: grids x ZeRO 0 to 3 x schedules x microbatches x recomputation.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from types import MappingProxyType

from engine.errors import PlanError
from engine.parallel.data_digits import expert_sizes
from engine.planning.cost_model.estimate import SLACK, LayoutEstimate, RankMemory, StepModel
from engine.planning.cost_model.layout import SPLIT, Reduction, TrainingLayout
from engine.planning.cost_model.workload import Recomputation, Workload

RECOMPUTATIONS: tuple[Recomputation, ...] = ("none", "selective", "full")
SCHEDULES = (("1f1b", 1), ("interleaved", 2), ("interleaved", 4), ("zb-h1", 1), ("zb-v", 2))
"""Schedules and stages per rank that are tried; gpipe and looped-bfs need more memory, dualpipe-v idles like zb-v."""
USABLE = 0.94
"""Fraction of GPU memory that a plan may fill."""
LEAST_POSITIONS = 8192
"""Least positions of a row on a context rank in a search (Llama 3, Dubey et al. 2024, table 4: 131,072 on 16)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """Conditions of a layout search: number of ranks, batch size, node size and GPU memory."""

    world: int
    rows: int
    """Global batch size in rows."""
    node: int
    """Number of GPUs per node."""
    memory_bytes: float
    """Memory of a GPU in bytes."""


def layouts(work: Workload, wish: Wish) -> Iterator[TrainingLayout]:
    """Yields every valid layout for ``work`` under the conditions ``wish``; each tensor-parallel group is inside a
    node.
    """
    sizes = [size for size in range(1, wish.world + 1) if wish.world % size == 0]
    for tp, pp, cp in product(sizes, sizes, (size for size in sizes if size in _context_sizes(work))):
        if wish.world % (tp * pp * cp) or pp > work.blocks or tp > wish.node or work.heads % tp or wish.node % tp:
            continue
        dp = wish.world // (tp * pp * cp)
        if wish.rows % dp == 0:
            for ep in _expert_sizes(work, dp, cp):
                yield from _of_grid(work, TrainingLayout(dp=dp, cp=cp, tp=tp, pp=pp, ep=ep), wish.rows // dp)


def _context_sizes(work: Workload) -> range:
    """Returns the numbers of context ranks that leave each at least LEAST_POSITIONS of a row."""
    return range(1, max(1, work.context // LEAST_POSITIONS) + 1)


def _expert_sizes(work: Workload, dp: int, cp: int) -> list[int]:
    """Returns the numbers of data and context ranks that may share the experts of a layer, evenly."""
    if work.experts is None:
        return [1]
    return [size for size in expert_sizes(dp, cp, None) if work.experts.experts % size == 0]


def _of_grid(work: Workload, grid: TrainingLayout, rows: int) -> Iterator[TrainingLayout]:
    for micro in (size for size in (1, 2, 4, 8, 16, 32) if rows % size == 0):
        count = rows // micro
        for kind, virtual in SCHEDULES if grid.pp > 1 else SCHEDULES[:1]:
            if _runs(grid.pp, count, kind, virtual, work.blocks):
                for (stage, reduction), mode in product(zero_stages(grid.dp * grid.cp), RECOMPUTATIONS):
                    yield replace(
                        grid, stage=stage, reduction=reduction, micro=micro, microbatches=count, schedule=kind,
                        virtual=virtual, recomputation=mode,
                    )  # fmt: skip


def zero_stages(shards: int) -> tuple[tuple[int, Reduction], ...]:
    """Returns the pairs (ZeRO stage, period of gradient reduction) to try for ``shards`` data and context ranks.

    The period is one "step" or one "microbatch".
    """
    several: tuple[tuple[int, Reduction], ...] = ((1, "step"), (2, "microbatch"), (3, "step"), (3, "microbatch"))
    return ((0, "step"), *several) if shards > 1 else ((0, "step"),)


def _runs(pp: int, microbatches: int, kind: str, virtual: int, blocks: int) -> bool:
    if pp * virtual > blocks or (pp > 1 and microbatches < pp):
        return False
    return kind != "interleaved" or microbatches % pp == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """Result of a layout search: estimates of the layouts that fit in memory, and the numbers of tried layouts and
    grids.
    """

    tried: int
    grids: int
    ranked: tuple[LayoutEstimate, ...]
    """Estimates of layouts that fit in memory, the fastest first."""
    smallest: LayoutEstimate
    """Estimate of the layout with the least memory; it may not fit."""


def search_layouts(work: Workload, model: StepModel, wish: Wish) -> SearchResult:
    """Estimates every valid layout by formulas, and ranks the layouts that fit in memory by speed.

    Raises:
        PlanError: no grid with this number of ranks can run the model with this batch size.
    """
    found = [model.estimate(layout) for layout in layouts(work, wish)]
    if not found:
        raise PlanError(
            f"no grid of {wish.world} ranks divides {wish.rows} rows, {work.heads} heads and {work.blocks} blocks; "
            f"give another --world, or another --batch, such as {max(1, wish.rows // wish.world) * wish.world}."
        )
    limit = USABLE * wish.memory_bytes
    fit = sorted((one for one in found if one.memory.total <= limit), key=_rank)
    grids = {one.layout.grid for one in found}
    return SearchResult(
        tried=len(found), grids=len(grids), ranked=tuple(fit), smallest=min(found, key=lambda one: one.memory.total)
    )


def _rank(one: LayoutEstimate) -> tuple[float, float]:
    return one.seconds.total, one.memory.total


def nearest(result: SearchResult, layout: TrainingLayout) -> LayoutEstimate | None:
    """Returns the estimate in ``result.ranked`` for the layout that differs from ``layout`` in the fewest settings. If
    several differ equally, returns the fastest; if no layout fits in memory, None.
    """
    return min(result.ranked, key=lambda one: (len(changes(layout, one.layout)), one.seconds.total), default=None)


SETTINGS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "grid": ("dp", "cp", "tp", "pp", "ep"),
        "microbatches": ("micro", "microbatches"),
        "schedule": ("schedule", "virtual"),
        "zero": ("stage", "reduction"),
        "recomputation": ("recomputation",),
        "inputs of blocks": ("inputs",),
        "sequence": ("sequence",),
    }
)
"""Setting of a user -> fields of a layout that it changes."""


def changes(before: TrainingLayout, after: TrainingLayout) -> dict[str, tuple[object, object]]:
    """Returns the settings that differ between two layouts: name -> (value in ``before``, value in ``after``).

    Leaves out the number of microbatches if the numbers of data ranks differ and the microbatch sizes are equal.
    """
    found: dict[str, tuple[object, object]] = {}
    for name, members in SETTINGS.items():
        old, new = (tuple(getattr(each, member) for member in members) for each in (before, after))
        if old != new and not (name == "microbatches" and before.dp != after.dp and before.micro == after.micro):
            found[name] = (old[0], new[0]) if len(members) == 1 else (old, new)
    return found


MOST_COUNTED = 6
"""Most layouts for which a whole plan is made, until one fits."""


Working = Callable[[LayoutEstimate, bool], float | None]
"""Function (estimate, fresh) that returns bytes of activations and buffers from sampled blocks; ``fresh`` allows a new
sample. None: no sample.
"""


class LayoutChoice:
    """Iterator over estimates of layouts that probably fit in memory, the fastest first.

    The caller plans each layout in detail and passes the plan's bytes to :meth:`learn`, which corrects later estimates.

    Args:
        ranked: estimates of layouts that fit according to formulas, the fastest first.
        limit: bytes that a layout may use on one rank.
        working: function (estimate, fresh) that returns bytes of activations and buffers, or None to use formulas;
            ``fresh`` True allows the function to run blocks anew to count bytes, see :meth:`need`.
    """

    def __init__(self, ranked: Sequence[LayoutEstimate], limit: float, working: Working = lambda *_: None) -> None:
        self._ranked, self._limit, self._working = ranked, limit, working
        self._factors: dict[tuple[Recomputation, bool, bool], float] = {}
        self._tried: set[TrainingLayout] = set()

    def __next__(self) -> LayoutEstimate:
        for one in self._ranked:
            if one.layout not in self._tried and self.need(one, fresh=True) <= self._limit:
                self._tried.add(one.layout)
                return one
        raise StopIteration

    def __iter__(self) -> "LayoutChoice":
        return self

    def learn(self, estimate: LayoutEstimate, counted: RankMemory) -> None:
        """Records ``counted``, the bytes of a whole plan, and scales later estimates of similar layouts accordingly."""
        self._tried.add(estimate.layout)
        before = self._known(estimate, False)
        if before > 0:
            self._factors[_held_alike(estimate.layout)] = (counted.activations + counted.buffers) / before

    def pass_over(self, layout: TrainingLayout) -> None:
        """Excludes ``layout`` from this iterator."""
        self._tried.add(layout)

    def need(self, one: LayoutEstimate, fresh: bool = False) -> float:
        """Returns the bytes of a rank for the layout of ``one``, corrected by :meth:`learn`.

        ``fresh``: True to allow new dry runs of blocks (tensors without data), in which activation bytes are counted.
        """
        working = self._factors.get(_held_alike(one.layout), 1.0) * self._known(one, fresh)
        return one.memory.total + (1 + SLACK) * (working - one.memory.activations - one.memory.buffers)

    def likely(self) -> tuple[LayoutEstimate, ...]:
        """Returns the remaining estimates of layouts that probably fit, the fastest first."""
        return tuple(one for one in self._ranked if one.layout not in self._tried and self.need(one) <= self._limit)

    def _known(self, one: LayoutEstimate, fresh: bool) -> float:
        """Returns activations and buffers before the factor."""
        sampled = self._working(one, fresh)
        return one.memory.activations + one.memory.buffers if sampled is None else sampled


def _held_alike(layout: TrainingLayout) -> tuple[Recomputation, bool, bool]:
    return layout.recomputation, layout.schedule in SPLIT, layout.cp > 1
