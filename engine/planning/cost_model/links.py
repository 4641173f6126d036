"""Links of each axis of a layout: tensor ranks are neighbours, then come data ranks and stages, in either order.

ring     a rank sends to the next one; groups of neighbours leave a node once, and share its way out
hop      a stage sends to the next one; all data and tensor coordinates do so at the same time

Ranks that share a node: tensor ranks are neighbours, then data ranks, then pipeline stages. Pure arithmetic.

Seconds of a rank's computation: for each class of operators the longer of its FLOPs and its bytes.

    product     FLOPs / (peak x product share x w / (w + half)), w the narrower side of what the rank multiplies,
                or the bytes of its weights and activations, whichever takes longer
    attention   executed FLOPs / (peak x attention share)
    pass        bytes / (memory rate x memory share)

A backward takes twice the products and passes, and 2.5 times the attention (its scores are computed again).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from typing import Literal

from engine.parallel.grid import Grid
from engine.planning.cost_model.hardware import GpuSpec
from engine.planning.cost_model.layout import EngineTraits, TrainingLayout
from engine.planning.cost_model.workload import Product, Workload


def tensor_groups_cross(tp: int, node: int) -> bool:
    """Returns True if a tensor group is on several nodes of ``node`` GPUs."""
    return tp > node or node % tp != 0


def placement_picture(grid: Grid, node: int) -> str:
    """Returns the nodes of a grid, one a line: ranks, and their stage, data and tensor coordinates."""
    lines = list(_lines(grid, node))
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def _lines(grid: Grid, node: int) -> Iterator[tuple[str, ...]]:
    yield "node", "ranks", "stage", "data", "tensor"
    for number in range(ceil(grid.world_size / node)):
        ranks = range(number * node, min((number + 1) * node, grid.world_size))
        coords = [grid.coord(rank) for rank in ranks]
        axes = (sorted({coord[axis] for coord in coords}) for axis in ("pp", "dp", "tp"))
        yield str(number), _span(list(ranks)), *(_span(values) for values in axes)


def _span(values: list[int]) -> str:
    """Returns the values of a node, which are consecutive, as 3 or 0-3."""
    return str(values[0]) if len(values) == 1 else f"{values[0]}-{values[-1]}"


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """Speed of a link, one way."""

    latency: float
    """Seconds of the shortest message or call."""
    rate: float
    """Bytes a second of each rank that sends."""

    def seconds(self, calls: float, count: float) -> float:
        """Returns the seconds of ``calls`` successive calls that send ``count`` bytes in total."""
        return calls * self.latency + count / self.rate


class Links:
    """Links of a layout on nodes of ``node`` GPUs."""

    def __init__(self, layout: TrainingLayout, gpu: GpuSpec, node: int) -> None:
        self._layout, self._gpu, self._node = layout, gpu, node
        self._grid = Grid(pp=layout.pp, dp=layout.dp * layout.cp, tp=layout.tp, order=layout.order)
        self._inside = LinkSpeed(gpu.link_latency, gpu.link_rate * gpu.reached.link)
        self._out = gpu.network_rate * gpu.reached.network

    def ring(self, axis: Literal["dp", "tp"]) -> LinkSpeed:
        """Returns the latency of a ring's step and the bytes a second of a rank."""
        stride = self._grid.stride(axis)
        if stride * self._grid.size(axis) <= self._node:
            return self._inside
        groups = min(stride, self._node)  # rings that leave a node, each once; together they have all of its links
        rate = min(self._inside.rate, self._node * self._out / groups)
        return LinkSpeed(self._gpu.network_latency, rate)

    def experts(self) -> LinkSpeed:
        """Returns the link of a rank to the ranks that share experts with it, which are neighbours on the data axis.

        Rows to ranks of the same node do not leave it.
        """
        near, ranks = max(1, self._node // self._grid.stride("dp")), self._layout.ep
        if ranks <= near:
            return self._inside
        leaving = (ranks - near) / (ranks - 1)
        return LinkSpeed(self._gpu.network_latency, min(self._inside.rate, self._out / leaving))

    def hop(self) -> LinkSpeed:
        """Returns the link from a stage to the next one."""
        layout = self._layout
        if layout.order == "tp-pp-dp":
            if self._grid.stride("dp") <= self._node:
                return self._inside
            sending = min(layout.tp, self._node)  # of a node, its last stage sends to another one
            return LinkSpeed(self._gpu.network_latency, min(self._inside.rate, self._node * self._out / sending))
        if layout.world <= self._node:
            return self._inside
        return LinkSpeed(self._gpu.network_latency, self._out)


LOGIT_BYTES = 18
"""Moved for an element of the logits in forward and backward, 16 and 32 bits of it, by a fused loss."""
SCORE_BYTES = 12
"""Moved for each score of attention that is not computed in blocks: written, masked, normalized, dropped, read."""
UPDATE_BYTES = 34
"""Moved for each element that Adam updates: gradient, master, two moments read and three written, weight, norm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSeconds:
    """Seconds of one block and microbatch on one rank, by class."""

    products: float
    attention: float
    passes: float

    @property
    def forward(self) -> float:
        """Seconds of the forward."""
        return self.products + self.attention + self.passes

    @property
    def backward(self) -> float:
        """Seconds of the backward, without recomputation."""
        return 2 * self.products + 2.5 * self.attention + 2 * self.passes


class Roofline:
    """Workload in a layout on a GPU."""

    def __init__(self, workload: Workload, layout: TrainingLayout, gpu: GpuSpec, traits: EngineTraits) -> None:
        self._workload, self._layout, self._gpu, self._traits = workload, layout, gpu, traits
        self._tokens = layout.micro * workload.context / layout.cp

    def block(self) -> BlockSeconds:
        """Returns the forward of a block."""
        work, layout, gpu = self._workload, self._layout, self._gpu
        flash = self._traits.flash
        executed = 4 * work.attention * work.context * (0.5 if work.causal and flash else 1.0)
        bytes_moved = (work.fused if self._traits.fused else work.passes).on(layout.tp, layout.sequence)
        bytes_moved += 0 if flash else SCORE_BYTES * work.heads * work.context / layout.tp
        return BlockSeconds(
            products=sum(self.product(product, self._traits.fp8) for product in work.products),
            attention=executed * self._tokens / layout.tp / (gpu.bf16_rate * gpu.reached.attention),
            passes=bytes_moved * self._tokens / self.memory_rate,
        )

    def product(self, product: Product, fp8: bool = False) -> float:
        """Returns the forward of a product."""
        gpu, tp = self._gpu, self._layout.tp if product.cut != "none" else 1
        width = product.narrow(tp)
        reached = width / (width + gpu.reached.product_half)
        rate = gpu.fp8_rate * gpu.reached.fp8 if fp8 else gpu.bf16_rate * gpu.reached.product
        flops = 2 * product.weights * self._tokens / tp
        moved = 2 * (product.weights / tp + self._tokens * (product.inner + product.outer) / max(1, tp))
        return max(flops / (rate * reached), moved / self.memory_rate)

    def head(self) -> float:
        """Returns the head and loss, forward and backward."""
        work = self._workload
        logits = self._tokens * work.vocabulary / self._layout.tp * LOGIT_BYTES
        return 3 * sum(self.product(product) for product in work.head) + logits / self.memory_rate

    def recomputed(self, block: BlockSeconds) -> float:
        """Returns the seconds of a block's forward that its backward repeats."""
        mode = self._layout.recomputation
        if mode == "full":
            return block.forward
        return block.passes + self._traits.products_again * block.products if mode == "selective" else 0.0

    @property
    def memory_rate(self) -> float:
        """Bytes a second that passes over memory reach."""
        return self._gpu.memory_rate * self._gpu.reached.memory
