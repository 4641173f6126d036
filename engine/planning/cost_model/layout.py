"""Layout of a training: grid, sharded state, schedule, batch and recomputation. Pure data, no torch.

Distribution of blocks to pipeline stages, the memory of a rank meanwhile, and its idle time. Closed forms.

p ranks, m microbatches, v stages a rank; the bubbles are those of ``engine.parallel.pipeline.schedule.kinds``.
"""

from dataclasses import dataclass
from math import ceil
from typing import Literal

from engine.parallel.grid import Order
from engine.planning.cost_model.workload import Recomputation, Workload

Reduction = Literal["step", "microbatch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingLayout:
    """Layout of a training step."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    """Ranks that share the tokens of a row. The engine has none; published runs do."""
    ep: int = 1
    """Data ranks that share the experts of a layer."""
    stage: int = 0
    """Stage of ZeRO."""
    schedule: str = "1f1b"
    virtual: int = 1
    micro: int = 1
    """Rows of a microbatch."""
    microbatches: int = 1
    recomputation: Recomputation = "none"
    reduction: Reduction = "step"
    """When ZeRO 2 and 3 reduce gradients; after each microbatch only shards of them are kept."""
    order: Order = "tp-dp-pp"
    """Order of the axes, from neighbours to the farthest ranks."""
    sequence: bool = True
    """Tensor ranks share activations between their products along the sequence."""

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def keeps_gradient_shards(self) -> bool:
        """No rank ever has all gradients of its parameters."""
        return self.stage >= 2 and self.reduction == "microbatch"

    @property
    def rows(self) -> int:
        """Rows of a step."""
        return self.dp * self.micro * self.microbatches

    def __str__(self) -> str:
        sizes = (("dp", self.dp), ("tp", self.tp), ("pp", self.pp), ("cp", self.cp))
        reduced = " of every microbatch" * self.keeps_gradient_shards
        grid = " x ".join(f"{axis}{size}" for axis, size in sizes if size > 1) or "1 rank"
        grid += f" (ep{self.ep})" * (self.ep > 1)
        grid += f" in the order {self.order}" * (self.order != "tp-dp-pp")
        virtual = f" of {self.virtual} stages a rank" if self.virtual > 1 else ""
        parts = [grid, f"ZeRO {self.stage}{reduced}"] + [f"{self.schedule}{virtual}"] * (self.pp > 1)
        parts.append(f"{self.microbatches} microbatches of {self.micro}")
        return ", ".join([*parts, f"recomputation {self.recomputation}"])


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTraits:
    """Traits of an engine that decide on costs; the defaults are this engine's on GPUs."""

    fused: bool = True
    """Elementwise code is fused, by kernels or a compiler."""
    fp8: bool = False
    """Products of blocks run in fp8."""
    tensor_overlap: float = 0.5
    """Part of the traffic of tensor ranks that overlaps with products; here the traffic of column inputs, half of
    it."""
    gradient_bytes: int = 4
    """Bytes of an element on the wire and in memory."""
    gathers_hidden: bool = False
    """True if gathers of ZeRO 1 and 2 overlap with the next forward."""
    regathers: bool = True
    """ZeRO 3 gathers again for the backward, in every microbatch."""
    balanced: bool = True
    """Stages are cut by their cost; False: equal numbers of blocks, and the head besides."""
    products_again: float = 0.0
    """Part of the products that recomputation "selective" repeats."""
    parallel_block: bool = False
    """Attention and MLP run side by side, and share their sums over tensor ranks."""
    flash: bool = True
    """Attention runs in blocks; False: its scores are written, all pairs of them."""


SPLIT = ("zb-h1", "zb-v", "dualpipe-v")
"""Schedules that compute weight gradients when nothing else can be done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageShare:
    """Share of the model on the rank that computes longest."""

    blocks: float
    heads: float
    """1 with the head, 0 without."""
    outer_parameters: float
    """Parameters of embedding or head."""


def slowest(work: Workload, pp: int, block: float, head: float, balanced: bool = True) -> StageShare:
    """Returns the share of the slowest pipeline rank, for seconds of a block and of the head."""
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
    """Returns the idle time of the pipeline for each second that a rank computes."""
    p, m, v = layout.pp, layout.microbatches, layout.virtual
    if p == 1:
        return 0.0
    if m < p and layout.schedule != "gpipe":
        v = 1  # the ranks wait for each other in every round
    parts = {"gpipe": 1.0, "1f1b": 1.0, "zb-h1": 3.0 * v, "zb-v": 6.0, "dualpipe-v": 6.0}
    return (p - 1) / (m * parts.get(layout.schedule, float(v)))


def microbatches_held(layout: TrainingLayout) -> float:
    """Counts the microbatches that the fullest rank holds, each over its whole slice of the model."""
    p, m, v = layout.pp, layout.microbatches, layout.virtual
    if layout.schedule in ("gpipe", "looped-bfs"):
        return float(m)
    if p == 1:
        return 1.0
    extra = {"interleaved": (p - 1) / v, "dualpipe-v": 0.5}
    return min(float(m), p + extra.get(layout.schedule, 0.0))
