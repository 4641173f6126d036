"""The backend interface, which moves tensors between ranks, and a backend that moves nothing.

``RecordingBackend`` replays a plan for any number of ranks in one process. The backend of real processes is
``torch_backend``.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple, Protocol

from torch import Tensor

from engine.parallel.comm.symmetric_memory import SharedBytes
from engine.parallel.grid import Axis, Grid

Wait = Callable[[], object]
Reduction = Literal["sum", "max"]
Flow = Literal["forward", "backward", "state"]
"""Content of a pipeline message: activations, their gradients, or state that is sent between steps."""


class Channel(NamedTuple):
    """The messages of one flow from one place to another, first in, first out.

    Places are stages of the model, not ranks: two ranks may share several stages and run them in different orders. So
    an activation never waits for a gradient, or for a message of another pair of stages. For "state", places are
    indices of axis pp.
    """

    flow: Flow
    source: int
    target: int


class Link(NamedTuple):
    """A channel, and the indices of axis pp that it connects."""

    channel: Channel
    source: int
    target: int


def state_link(source: int, target: int) -> Link:
    """The link for messages between steps, from one index of axis pp to another."""
    return Link(Channel("state", source, target), source, target)


def link_rounds(links: Iterable[Link]) -> list[tuple[Link, ...]]:
    """Links that need a group of two ranks, in rounds: an index of axis pp is the end of one link of a round at most.

    A chain of stages takes two rounds for each flow, whatever its length. State needs no groups: all ranks of a
    pipeline send it in one order, over the group of the axis.
    """
    rounds: list[list[Link]] = []
    ends: list[set[int]] = []
    for link in sorted({link for link in links if link.channel.flow != "state"}):
        here = {link.source, link.target}
        free = next((number for number, taken in enumerate(ends) if not here & taken), len(rounds))
        if free == len(rounds):
            rounds.append([])
            ends.append(set())
        rounds[free].append(link)
        ends[free] |= here
    return [tuple(each) for each in rounds]


class Backend(Protocol):
    """Moves tensors between the ranks of one axis; each method returns a function that completes the operation.

    ``shard`` may be this rank's own slice of ``full``. Preparations and ``close`` do nothing by default.
    """

    def all_reduce(self, tensor: Tensor, axis: Axis, op: Reduction = "sum") -> Wait:
        """Sum ``tensor`` in place over the axis, or take the elementwise maximum."""

    def reduce_scatter(self, shard: Tensor, full: Tensor, axis: Axis) -> Wait:
        """Sum ``full`` over the axis and leave this rank's slice in ``shard``; may overwrite ``full``."""

    def all_gather(self, full: Tensor, shard: Tensor, axis: Axis) -> Wait:
        """Concatenate the shards of the axis into ``full``."""

    def connect_data(self, members: tuple[int, ...]) -> None:
        """Prepare ``all_to_all`` between these indices of the shard line; every rank calls it."""
        return

    def all_to_all(self, received: Tensor, given: Tensor, members: tuple[int, ...], axis: Axis) -> Wait:
        """Send slice i of ``given`` to the i-th of these indices of ``axis``; slice i of ``received`` comes from it.

        Of an axis other than the shard line they are all indices.
        """

    def exchange(self, received: Tensor, given: Tensor, gets: Sequence[int], gives: Sequence[int], axis: Axis) -> Wait:
        """Send ``gives[i]`` rows of ``given`` to index i of ``axis``, and receive ``gets[i]`` rows from it."""

    def open_gathers(self, within: int | None = None, axis: Axis | None = None) -> None:
        """Prepare ``gather_parameters``; every rank calls it.

        ``within``: over so many data ranks, side by side, instead of all. ``axis``: over it instead.
        """
        return

    def gather_parameters(
        self, pairs: Sequence[tuple[Tensor, Tensor]], within: int | None = None, axis: Axis | None = None
    ) -> Wait:
        """All-gather each (full, shard) over ``axis``, or ``within`` ranks of the shard line, apart from other traffic.

        Neither: over all ranks of the shard line.
        """

    def exchange_gathers(self, data: bytes, within: int) -> Sequence[bytes]:
        """The bytes of all ranks that ``gather_parameters`` joins, of equal length; between hosts: no device waits."""

    def send(self, tensor: Tensor, to: int, channel: Channel) -> Wait:
        """Send ``tensor`` to index ``to`` of axis pp; it must not change before the wait."""

    def receive(self, tensor: Tensor, source: int, channel: Channel) -> Wait:
        """Fill ``tensor`` with the message that index ``source`` of axis pp sends."""

    def connect(self, stages: tuple[int, ...]) -> None:
        """Prepare ``sum_over_stages``; every rank calls it."""
        return

    def link(self, links: Sequence[Link]) -> None:
        """Prepare messages over these links; every rank calls it."""
        return

    def sum_over_stages(self, tensor: Tensor, stages: tuple[int, ...]) -> Wait:
        """Sum ``tensor`` in place over these indices of axis pp."""

    def share_bytes(self, axis: Axis, size: int) -> SharedBytes | None:
        """Memory of ``size`` bytes on each rank that all ranks of the axis can write; None on all of them if there is
        none. Every rank calls it."""
        return None

    def close(self) -> None:
        """Release groups and memory."""
        return


class RecordingBackend(Backend):
    """Moves nothing: every other rank seems to contribute zeros, and a gather places only this rank's shard."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid

    def all_reduce(self, tensor: Tensor, axis: Axis, op: Reduction = "sum") -> Wait:
        """Leave ``tensor`` unchanged."""
        return lambda: None

    def reduce_scatter(self, shard: Tensor, full: Tensor, axis: Axis) -> Wait:
        """Copy this rank's slice of ``full``."""
        shard.copy_(self._own(full, axis))
        return lambda: None

    def all_gather(self, full: Tensor, shard: Tensor, axis: Axis) -> Wait:
        """Copy ``shard`` to this rank's slice of ``full``."""
        self._own(full, axis).copy_(shard)
        return lambda: None

    def all_to_all(self, received: Tensor, given: Tensor, members: tuple[int, ...], axis: Axis) -> Wait:
        """Receives this rank's own values, and zeros."""
        own, slices = members.index(self._grid.index(axis)), received.view(len(members), -1)
        slices.zero_()
        slices[own].copy_(given.view(len(members), -1)[own])
        return lambda: None

    def exchange(self, received: Tensor, given: Tensor, gets: Sequence[int], gives: Sequence[int], axis: Axis) -> Wait:
        """Receives this rank's own rows, and zeros."""
        own = self._grid.index(axis)
        received.zero_()
        before = slice(sum(gets[:own]), sum(gets[: own + 1])), slice(sum(gives[:own]), sum(gives[: own + 1]))
        received[before[0]].copy_(given[before[1]])
        return lambda: None

    def gather_parameters(
        self, pairs: Sequence[tuple[Tensor, Tensor]], within: int | None = None, axis: Axis | None = None
    ) -> Wait:
        """Copy each shard to this rank's slice of its full tensor."""
        line = axis or self._grid.shard_line
        ranks = within or self._grid.size(line)
        for full, shard in pairs:
            full.view(ranks, -1)[self._grid.index(line) % ranks].copy_(shard)
        return lambda: None

    def exchange_gathers(self, data: bytes, within: int) -> Sequence[bytes]:
        """Every rank seems to give the same."""
        return [data] * within

    def sum_over_stages(self, tensor: Tensor, stages: tuple[int, ...]) -> Wait:
        """Leave ``tensor`` unchanged."""
        return lambda: None

    def send(self, tensor: Tensor, to: int, channel: Channel) -> Wait:
        """Send nothing."""
        return lambda: None

    def receive(self, tensor: Tensor, source: int, channel: Channel) -> Wait:
        """Receive zeros."""
        tensor.zero_()
        return lambda: None

    def _own(self, full: Tensor, axis: Axis) -> Tensor:
        return full.view(self._grid.size(axis), -1)[self._grid.index(axis)]
