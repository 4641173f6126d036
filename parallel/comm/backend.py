"""Who moves tensors between ranks: the interface, and a backend that moves nothing.

With ``RecordingBackend`` a plan can be replayed for any number of ranks in one process. The backend of
real processes is in ``comm``, the only door to ``torch.distributed``.
"""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, Protocol

from torch import Tensor

from engine.parallel.grid import Axis, Grid

Wait = Callable[[], object]
Reduction = Literal["sum", "max"]
Flow = Literal["forward", "backward", "state"]
"""What a message of a pipeline carries: values, their gradients, or anything between steps."""


class Channel(NamedTuple):
    """Messages of one flow from one place to another, first in, first out.

    Places are stages of the model, not ranks: two ranks may share several stages, and work on them in different
    orders. An activation never waits behind a gradient, nor behind one of another pair of stages. For "state"
    places are indices of axis pp.
    """

    flow: Flow
    source: int
    target: int


class Link(NamedTuple):
    """A channel, and the indices of axis pp between which it runs."""

    channel: Channel
    source: int
    target: int


def state_link(source: int, target: int) -> Link:
    """What travels between steps from one index of axis pp to another."""
    return Link(Channel("state", source, target), source, target)


class Backend(Protocol):
    """Moves tensors between the ranks of one axis; returns what must be called to finish.

    ``shard`` may be this rank's own slice of ``full``.
    """

    def all_reduce(self, tensor: Tensor, axis: Axis, op: Reduction = "sum") -> Wait:
        """Sum ``tensor``, or take its largest values, in place over the axis."""

    def reduce_scatter(self, shard: Tensor, full: Tensor, axis: Axis) -> Wait:
        """Sum ``full`` over the axis and leave this rank's slice in ``shard``; ``full`` may be spoiled."""

    def all_gather(self, full: Tensor, shard: Tensor, axis: Axis) -> Wait:
        """Concatenate the shards of the axis into ``full``."""

    def open_gathers(self) -> None:
        """Prepare ``gather_parameters``; called by all ranks."""

    def gather_parameters(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Wait:
        """Concatenate the shards of axis dp of each (full, shard), apart from all other traffic of that axis."""

    def send(self, tensor: Tensor, to: int, channel: Channel) -> Wait:
        """Send ``tensor`` to index ``to`` of axis pp; it must not change before the wait."""

    def receive(self, tensor: Tensor, source: int, channel: Channel) -> Wait:
        """Fill ``tensor`` with what index ``source`` of axis pp sends."""

    def connect(self, stages: tuple[int, ...]) -> None:
        """Prepare ``sum_over_stages``; called by all ranks."""

    def link(self, links: Sequence[Link]) -> None:
        """Prepare messages over these links; called by all ranks."""

    def sum_over_stages(self, tensor: Tensor, stages: tuple[int, ...]) -> Wait:
        """Sum ``tensor`` in place over these indices of axis pp."""

    def close(self) -> None:
        """Let go of everything that belongs to the processes."""


class RecordingBackend:
    """Moves nothing: every rank seems to send zeros, except that gathers place the own shard."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid

    def all_reduce(self, tensor: Tensor, axis: Axis, op: Reduction = "sum") -> Wait:
        """Leave ``tensor`` as it is."""
        return lambda: None

    def reduce_scatter(self, shard: Tensor, full: Tensor, axis: Axis) -> Wait:
        """Copy this rank's slice of ``full``."""
        shard.copy_(self._own(full, axis))
        return lambda: None

    def all_gather(self, full: Tensor, shard: Tensor, axis: Axis) -> Wait:
        """Copy ``shard`` to this rank's slice of ``full``."""
        self._own(full, axis).copy_(shard)
        return lambda: None

    def open_gathers(self) -> None:
        """Nothing to prepare."""

    def gather_parameters(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Wait:
        """Copy each shard to this rank's slice."""
        for full, shard in pairs:
            self.all_gather(full, shard, "dp")
        return lambda: None

    def connect(self, stages: tuple[int, ...]) -> None:
        """Nothing to prepare."""

    def link(self, links: Sequence[Link]) -> None:
        """Nothing to prepare."""

    def sum_over_stages(self, tensor: Tensor, stages: tuple[int, ...]) -> Wait:
        """Leave ``tensor`` as it is."""
        return lambda: None

    def send(self, tensor: Tensor, to: int, channel: Channel) -> Wait:
        """Send nothing."""
        return lambda: None

    def receive(self, tensor: Tensor, source: int, channel: Channel) -> Wait:
        """Receive zeros."""
        tensor.zero_()
        return lambda: None

    def close(self) -> None:
        """Nothing to let go of."""

    def _own(self, full: Tensor, axis: Axis) -> Tensor:
        return full.view(self._grid.size(axis), -1)[self._grid.index(axis)]
