"""What each axis of a layout carries: tensor ranks are neighbours, then come data ranks and stages, in either order.

ring     a rank sends to the next one; groups of neighbours leave a node once, and share its way out
hop      a stage sends to the next one; all data and tensor coordinates do so at the same time
"""

from dataclasses import dataclass
from typing import Literal

from engine.parallel.grid import Grid
from engine.planning.cost_model.hardware import GpuSpec
from engine.planning.cost_model.layout import TrainingLayout


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """Speed of a link, one way."""

    latency: float
    """Seconds of the shortest message or call."""
    rate: float
    """Bytes a second of each rank that sends."""

    def seconds(self, calls: float, count: float) -> float:
        """Of ``calls`` one after another that send ``count`` bytes together."""
        return calls * self.latency + count / self.rate


class Links:
    """The links of a layout on nodes of ``node`` GPUs."""

    def __init__(self, layout: TrainingLayout, gpu: GpuSpec, node: int) -> None:
        self._layout, self._gpu, self._node = layout, gpu, node
        self._grid = Grid(pp=layout.pp, dp=layout.dp * layout.cp, tp=layout.tp, order=layout.order)
        self._inside = LinkSpeed(gpu.link_latency, gpu.link_rate * gpu.reached.link)
        self._out = gpu.network_rate * gpu.reached.network

    def ring(self, axis: Literal["dp", "tp"]) -> LinkSpeed:
        """Of a step of a ring: latency, and bytes a second of a rank."""
        stride = self._grid.stride(axis)
        if stride * self._grid.size(axis) <= self._node:
            return self._inside
        groups = min(stride, self._node)  # rings that leave a node, each once; together they have all of its links
        rate = min(self._inside.rate, self._node * self._out / groups)
        return LinkSpeed(self._gpu.network_latency, rate)

    def hop(self) -> LinkSpeed:
        """From a stage to the next one."""
        layout = self._layout
        if layout.order == "tp-pp-dp":
            if self._grid.stride("dp") <= self._node:
                return self._inside
            sending = min(layout.tp, self._node)  # of a node, its last stage sends to another one
            return LinkSpeed(self._gpu.network_latency, min(self._inside.rate, self._node * self._out / sending))
        if layout.world <= self._node:
            return self._inside
        return LinkSpeed(self._gpu.network_latency, self._out)
