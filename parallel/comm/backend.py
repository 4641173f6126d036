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
    """Sequence of messages of one flow between two pipeline stages, first in, first out.

    ``source`` and ``target`` are stages, not ranks: two ranks may run several stages in different orders. So an
    activation never waits for a gradient, or for a message of another pair of stages. For "state" they are indices of
    axis pp.
    """

    flow: Flow
    source: int
    target: int


class Link(NamedTuple):
    """Channel, with the indices on axis pp of its sending and receiving rank."""

    channel: Channel
    source: int
    target: int


def state_link(source: int, target: int) -> Link:
    """Returns the link for messages between steps, from index ``source`` to ``target`` of axis pp."""
    return Link(Channel("state", source, target), source, target)


def link_rounds(links: Iterable[Link]) -> list[tuple[Link, ...]]:
    """Sorts links that need a process group of two ranks into rounds; each index of axis pp is in one link of a round.

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
    """Interface for communication along the axes of a grid; each method returns a function that waits for the result.

    ``shard`` may be this rank's own slice of ``full``. Methods that prepare groups, and ``close``, do nothing by
    default.
    """

    def all_reduce(self, tensor: Tensor, axis: Axis, op: Reduction = "sum") -> Wait:
        """Sums ``tensor`` in place over ``axis``; ``op`` "max" takes the elementwise maximum."""

    def reduce_scatter(self, shard: Tensor, full: Tensor, axis: Axis) -> Wait:
        """Sums ``full`` over ``axis`` and writes this rank's slice to ``shard``; may overwrite ``full``."""

    def all_gather(self, full: Tensor, shard: Tensor, axis: Axis) -> Wait:
        """Concatenates the shards of all ranks along ``axis`` into ``full``."""

    def connect_data(self, members: tuple[int, ...]) -> None:
        """Creates the group in which the ranks with indices ``members`` on the data axis call ``all_to_all``; every
        rank calls it.
        """
        return

    def all_to_all(self, received: Tensor, given: Tensor, members: tuple[int, ...], axis: Axis) -> Wait:
        """Sends slice i of ``given`` to rank ``members[i]`` of ``axis``, and receives slice i of ``received`` from that
        rank.

        ``members`` are all indices of ``axis``, unless it is the data axis.
        """

    def exchange(self, received: Tensor, given: Tensor, gets: Sequence[int], gives: Sequence[int], axis: Axis) -> Wait:
        """Sends ``gives[i]`` rows of ``given`` to index i of ``axis``, and receives ``gets[i]`` rows from it into
        ``received``.
        """

    def open_gathers(self, within: int | None = None, axis: Axis | None = None) -> None:
        """Creates the groups of ``gather_parameters``, by default one of all data ranks; every rank calls it.

        ``within``: number of neighbouring data ranks in a group. ``axis``: the axis along which ranks form a group.
        """
        return

    def gather_parameters(
        self, pairs: Sequence[tuple[Tensor, Tensor]], within: int | None = None, axis: Axis | None = None
    ) -> Wait:
        """All-gathers each (full, shard) pair in a process group separate from other collectives.

        The group is ``axis``, or ``within`` neighbouring data ranks; without either, all data ranks.
        """

    def exchange_gathers(self, data: bytes, within: int) -> Sequence[bytes]:
        """All-gathers ``data``, of equal length on all ranks, over the ranks of ``gather_parameters``; returns the
        bytes of each rank. Only the hosts communicate, so no device synchronizes.
        """

    def send(self, tensor: Tensor, to: int, channel: Channel) -> Wait:
        """Sends ``tensor`` to index ``to`` of axis pp; the tensor must not change before the wait."""

    def receive(self, tensor: Tensor, source: int, channel: Channel) -> Wait:
        """Receives into ``tensor`` the next message of ``channel`` from index ``source`` of axis pp."""

    def connect(self, stages: tuple[int, ...]) -> None:
        """Creates the group in which the ranks with indices ``stages`` on axis pp call ``sum_over_stages``; every rank
        calls it.
        """
        return

    def link(self, links: Sequence[Link]) -> None:
        """Creates the groups for messages over ``links``; every rank calls it."""
        return

    def sum_over_stages(self, tensor: Tensor, stages: tuple[int, ...]) -> Wait:
        """Sums ``tensor`` in place over the ranks with indices ``stages`` on axis pp."""

    def share_bytes(self, axis: Axis, size: int) -> SharedBytes | None:
        """Allocates ``size`` bytes on each rank of ``axis``, writable by all of its ranks; every rank calls this. None
        on all ranks where the devices cannot share memory.
        """
        return None

    def close(self) -> None:
        """Destroys the groups and releases shared memory."""
        return


class RecordingBackend(Backend):
    """Backend without communication: other ranks contribute zeros, and a gather writes only this rank's shard."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid

    def all_reduce(self, tensor: Tensor, axis: Axis, op: Reduction = "sum") -> Wait:
        """Leaves ``tensor`` unchanged."""
        return lambda: None

    def reduce_scatter(self, shard: Tensor, full: Tensor, axis: Axis) -> Wait:
        """Copies this rank's slice of ``full`` to ``shard``."""
        shard.copy_(self._own(full, axis))
        return lambda: None

    def all_gather(self, full: Tensor, shard: Tensor, axis: Axis) -> Wait:
        """Copies ``shard`` to this rank's slice of ``full``."""
        self._own(full, axis).copy_(shard)
        return lambda: None

    def all_to_all(self, received: Tensor, given: Tensor, members: tuple[int, ...], axis: Axis) -> Wait:
        """Copies this rank's own slice; slices of other ranks are zeros."""
        own, slices = members.index(self._grid.index(axis)), received.view(len(members), -1)
        slices.zero_()
        slices[own].copy_(given.view(len(members), -1)[own])
        return lambda: None

    def exchange(self, received: Tensor, given: Tensor, gets: Sequence[int], gives: Sequence[int], axis: Axis) -> Wait:
        """Copies this rank's own rows; rows of other ranks are zeros."""
        own = self._grid.index(axis)
        received.zero_()
        before = slice(sum(gets[:own]), sum(gets[: own + 1])), slice(sum(gives[:own]), sum(gives[: own + 1]))
        received[before[0]].copy_(given[before[1]])
        return lambda: None

    def gather_parameters(
        self, pairs: Sequence[tuple[Tensor, Tensor]], within: int | None = None, axis: Axis | None = None
    ) -> Wait:
        """Copies each shard to this rank's slice of its full tensor."""
        line = axis or self._grid.shard_line
        ranks = within or self._grid.size(line)
        for full, shard in pairs:
            full.view(ranks, -1)[self._grid.index(line) % ranks].copy_(shard)
        return lambda: None

    def exchange_gathers(self, data: bytes, within: int) -> Sequence[bytes]:
        """Returns this rank's ``data`` for each of ``within`` ranks."""
        return [data] * within

    def sum_over_stages(self, tensor: Tensor, stages: tuple[int, ...]) -> Wait:
        """Leaves ``tensor`` unchanged."""
        return lambda: None

    def send(self, tensor: Tensor, to: int, channel: Channel) -> Wait:
        """Sends nothing."""
        return lambda: None

    def receive(self, tensor: Tensor, source: int, channel: Channel) -> Wait:
        """Fills ``tensor`` with zeros instead of receiving a message."""
        tensor.zero_()
        return lambda: None

    def _own(self, full: Tensor, axis: Axis) -> Tensor:
        return full.view(self._grid.size(axis), -1)[self._grid.index(axis)]
