"""Link speed of each axis of a layout, and roofline of a rank's computation. Pure arithmetic.

ring     a rank sends to the next one; adjacent groups leave a node once, and share its network
hop      a stage sends to the next one, for all data and tensor coordinates at once

Tensor ranks are adjacent, then data ranks and stages in either order. Seconds of operators are the longer of FLOPs and
bytes:

    product     FLOPs / (peak x product fraction x w / (w + half)), w the narrower side of a rank's product
    attention   executed FLOPs / (peak x attention fraction)
    pass        bytes / (memory rate x memory fraction)

A backward takes twice the products and passes, and 2.5 times the attention (its scores are recomputed).
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
    """Returns True if some group of ``tp`` tensor ranks spans several nodes of ``node`` GPUs."""
    return tp > node or node % tp != 0


def placement_picture(grid: Grid, node: int) -> str:
    """Returns a text table with one line per node of ``node`` GPUs: the node's ranks, and the ranks' coordinates on pp,
    dp, cp (left out with one context rank) and tp.
    """
    lines = list(_lines(grid, node))
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def _lines(grid: Grid, node: int) -> Iterator[tuple[str, ...]]:
    shown = {"pp": "stage", "dp": "data", **({"cp": "context"} if grid.cp > 1 else {}), "tp": "tensor"}
    yield "node", "ranks", *shown.values()
    for number in range(ceil(grid.world_size / node)):
        ranks = range(number * node, min((number + 1) * node, grid.world_size))
        coords = [grid.coord(rank) for rank in ranks]
        axes = (sorted({coord[axis] for coord in coords}) for axis in shown)
        yield str(number), _span(list(ranks)), *(_span(values) for values in axes)


def _span(values: list[int]) -> str:
    """Returns the values of a node, which are consecutive, as 3 or 0-3."""
    return str(values[0]) if len(values) == 1 else f"{values[0]}-{values[-1]}"


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """One-way latency and bandwidth of a link."""

    latency: float
    """Seconds of an empty message or call."""
    rate: float
    """Bytes per second of each sending rank."""

    def seconds(self, calls: float, count: float) -> float:
        """Returns the seconds of ``calls`` consecutive calls that send ``count`` bytes in total."""
        return calls * self.latency + count / self.rate


class Links:
    """Link speeds between the ranks of a training layout on a GPU type, with ``node`` GPUs per node."""

    def __init__(self, layout: TrainingLayout, gpu: GpuSpec, node: int) -> None:
        self._layout, self._gpu, self._node = layout, gpu, node
        self._grid = Grid(pp=layout.pp, dp=layout.dp, cp=layout.cp, tp=layout.tp, order=layout.order)
        self._inside = LinkSpeed(gpu.link_latency, gpu.link_rate * gpu.reached.link)
        self._out = gpu.network_rate * gpu.reached.network

    def ring(self, axis: Literal["dp+cp", "cp", "tp"]) -> LinkSpeed:
        """Returns the link speed of a rank in a ring collective over ``axis``, limited by the network if some ring
        spans several nodes.
        """
        parts = self._parts(axis)
        stride = min(stride for stride, _ in parts)
        if all(stride * size <= self._node for stride, size in parts):
            return self._inside
        groups = min(stride, self._node)  # rings that leave a node, each once; together they have all of its links
        rate = min(self._inside.rate, self._node * self._out / groups)
        return LinkSpeed(self._gpu.network_latency, rate)

    def experts(self) -> LinkSpeed:
        """Returns the speed at which a rank exchanges token rows over the axis "ep", which divides the experts."""
        near, ranks = max(1, self._node // min(stride for stride, _ in self._parts("dp+cp"))), self._layout.ep
        if ranks <= near:
            return self._inside
        leaving = (ranks - near) / (ranks - 1)
        return LinkSpeed(self._gpu.network_latency, min(self._inside.rate, self._out / leaving))

    def _parts(self, axis: str) -> list[tuple[int, int]]:
        """Returns stride and size of each part of ``axis`` that has several ranks; of its first part if none has."""
        parts = [(self._grid.stride(name), self._grid.size(name)) for name in axis.split("+")]
        return [part for part in parts if part[1] > 1] or parts[:1]

    def hop(self) -> LinkSpeed:
        """Returns the speed of the link from a pipeline stage to the next one."""
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
"""Memory bytes moved per logit in forward and backward of a fused loss."""
SCORE_BYTES = 12
"""Memory bytes moved per attention score without flash attention."""
UPDATE_BYTES = 34
"""Memory bytes moved per element in an Adam update: gradient, master, moments, weight, norm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSeconds:
    """Forward seconds of one block and microbatch on one rank: matrix products, attention, and elementwise passes."""

    products: float
    attention: float
    passes: float

    @property
    def forward(self) -> float:
        """Forward seconds of all operators together."""
        return self.products + self.attention + self.passes

    @property
    def backward(self) -> float:
        """Backward seconds of the block and microbatch, without recomputation."""
        return 2 * self.products + 2.5 * self.attention + 2 * self.passes


class Roofline:
    """Roofline model of a workload and layout on a GPU type: operators are limited by FLOP/s or by memory bandwidth."""

    def __init__(self, workload: Workload, layout: TrainingLayout, gpu: GpuSpec, traits: EngineTraits) -> None:
        self._workload, self._layout, self._gpu, self._traits = workload, layout, gpu, traits
        self._tokens = layout.micro * workload.context / layout.cp

    def block(self) -> BlockSeconds:
        """Returns the forward seconds of one block and microbatch on one rank, by class of operator."""
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
        """Returns the forward seconds of a matrix product for one microbatch on one rank; ``fp8``: True for fp8, else
        bf16.
        """
        gpu, tp = self._gpu, self._layout.tp if product.cut != "none" else 1
        width = product.narrow(tp)
        reached = width / (width + gpu.reached.product_half)
        rate = gpu.fp8_rate * gpu.reached.fp8 if fp8 else gpu.bf16_rate * gpu.reached.product
        flops = 2 * product.weights * self._tokens / tp
        moved = 2 * (product.weights / tp + self._tokens * (product.inner + product.outer) / max(1, tp))
        return max(flops / (rate * reached), moved / self.memory_rate)

    def head(self) -> float:
        """Returns the seconds of head and loss for one microbatch on one rank, forward and backward together."""
        work = self._workload
        logits = self._tokens * work.vocabulary / self._layout.tp * LOGIT_BYTES
        return 3 * sum(self.product(product) for product in work.head) + logits / self.memory_rate

    def recomputed(self, block: BlockSeconds) -> float:
        """Returns the seconds that recomputation adds to the backward of a block with the forward seconds ``block``."""
        mode = self._layout.recomputation
        if mode == "full":
            return block.forward
        return block.passes + self._traits.products_again * block.products if mode == "selective" else 0.0

    @property
    def memory_rate(self) -> float:
        """Memory bandwidth that training reaches, in bytes per second."""
        return self._gpu.memory_rate * self._gpu.reached.memory
