"""Training layout: grid, ZeRO stage, schedule, batch and recomputation. Pure data, no torch.

Closed forms for the blocks of each stage, microbatches in flight and pipeline bubbles.

p ranks, m microbatches, v stages a rank; bubbles as in ``engine.parallel.pipeline.schedule.kinds``.
"""

from dataclasses import dataclass
from math import ceil
from typing import Literal

from engine.parallel.grid import Order
from engine.planning.cost_model.workload import Recomputation, Workload

Reduction = Literal["step", "microbatch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingLayout:
    """Layout of a training step: grid, ZeRO stage, schedule, batch and recomputation."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    """Context-parallel ranks, which share the tokens of a row; 1 in this engine."""
    ep: int = 1
    """Number of data ranks among which the experts of a layer are divided."""
    stage: int = 0
    """ZeRO stage, 0 to 3."""
    schedule: str = "1f1b"
    virtual: int = 1
    micro: int = 1
    """Rows of a microbatch."""
    microbatches: int = 1
    recomputation: Recomputation = "none"
    inputs: Literal["device", "host"] = "device"
    """Memory in which recomputed blocks store their inputs."""
    reduction: Reduction = "step"
    """When ZeRO 2 and 3 reduce gradients; "microbatch" stores only shards."""
    order: Order = "tp-dp-pp"
    """Order of the axes, from adjacent ranks outwards."""
    sequence: bool = True
    """True for sequence parallelism between tensor-parallel layers."""

    @property
    def world(self) -> int:
        """Number of ranks of the grid."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def grid(self) -> tuple[int, int, int, int]:
        """Sizes of the axes (dp, cp, tp, pp)."""
        return self.dp, self.cp, self.tp, self.pp

    @property
    def keeps_gradient_shards(self) -> bool:
        """True if a rank accumulates only its shard of the gradients (ZeRO 2 or 3 with ``reduce: "microbatch"``)."""
        return self.stage >= 2 and self.reduction == "microbatch"

    @property
    def rows(self) -> int:
        """Global batch size in rows."""
        return self.dp * self.micro * self.microbatches

    def __str__(self) -> str:
        sizes = zip(("dp", "cp", "tp", "pp"), self.grid, strict=True)
        reduced = " of every microbatch" * self.keeps_gradient_shards
        grid = " x ".join(f"{axis}{size}" for axis, size in sizes if size > 1) or "1 rank"
        grid += f" (ep{self.ep})" * (self.ep > 1)
        grid += f" in the order {self.order}" * (self.order != "tp-dp-pp")
        virtual = f" of {self.virtual} stages a rank" if self.virtual > 1 else ""
        parts = [grid, f"ZeRO {self.stage}{reduced}"] + [f"{self.schedule}{virtual}"] * (self.pp > 1)
        parts.append(f"{self.microbatches} microbatches of {self.micro}")
        host = ", their inputs on the host" if self.inputs == "host" else ""
        return ", ".join([*parts, f"recomputation {self.recomputation}{host}"])


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTraits:
    """Properties of a training engine that affect time and memory; the defaults describe this engine on GPUs."""

    fused: bool = True
    """True if elementwise operators are fused, by kernels or a compiler."""
    fp8: bool = False
    """True if matrix products of blocks run in fp8."""
    tensor_overlap: float = 0.5
    """Fraction of tensor-parallel traffic that overlaps with matrix products."""
    gradient_bytes: int = 4
    """Bytes of a gradient element in memory and messages."""
    gathers_hidden: bool = False
    """True if all-gathers of ZeRO 1 and 2 overlap with the next forward."""
    regathers: bool = True
    """True if ZeRO 3 gathers parameters again for the backward of every microbatch."""
    balanced: bool = True
    """True if stages are balanced by cost; False: equal numbers of blocks."""
    products_again: float = 0.0
    """Fraction of matrix products that recomputation "selective" repeats."""
    parallel_block: bool = False
    """True if attention and MLP run in parallel, and share their all-reduces over tp."""
    ring: bool = False
    """True if context ranks pass keys and values around a ring; False if each gathers all of them for a block."""
    flash: bool = True
    """True for flash attention; False: attention scores are written to memory."""


SPLIT = ("zb-h1", "zb-v", "dualpipe-v")
"""Schedules that defer weight gradients into idle time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageShare:
    """Share of the model on the slowest pipeline rank: numbers of blocks, language-model heads, and parameters outside
    of blocks.
    """

    blocks: float
    heads: float
    """Number of heads in the stage: 1 or 0."""
    outer_parameters: float
    """Number of parameters of embedding or head in the stage."""


def slowest(work: Workload, pp: int, block: float, head: float, balanced: bool = True) -> StageShare:
    """Returns the share of the model on the slowest of ``pp`` pipeline ranks.

    ``block``, ``head``: seconds of a block and of the language-model head. ``balanced``: True for stages of equal time,
    False for stages of equally many blocks.
    """
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
    """Returns the ratio of a rank's pipeline idle time to its compute time in a step of ``layout``; 0 without a
    pipeline.
    """
    p, m, v = layout.pp, layout.microbatches, layout.virtual
    if p == 1:
        return 0.0
    if m < p and layout.schedule != "gpipe":
        v = 1  # the ranks wait for each other in every round
    parts = {"gpipe": 1.0, "1f1b": 1.0, "zb-h1": 3.0 * v, "zb-v": 6.0, "dualpipe-v": 6.0}
    return (p - 1) / (m * parts.get(layout.schedule, float(v)))


def microbatches_held(layout: TrainingLayout) -> float:
    """Returns the largest number of microbatches with stored activations on one pipeline rank at the same time."""
    p, m, v = layout.pp, layout.microbatches, layout.virtual
    if layout.schedule in ("gpipe", "looped-bfs"):
        return float(m)
    if p == 1:
        return 1.0
    extra = {"interleaved": (p - 1) / v, "dualpipe-v": 0.5}
    return min(float(m), p + extra.get(layout.schedule, 0.0))
