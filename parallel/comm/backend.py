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
    """First-in-first-out channel for messages of one ``flow`` from pipeline stage ``source`` to stage ``target``.

    ``flow`` is "forward" (activations), "backward" (their gradients) or "state" (training state, between two steps). A
    message waits only for earlier messages of its channel. For "state", ``source`` and ``target`` are pipeline ranks.
    """

    flow: Flow
    source: int
    target: int


class Link(NamedTuple):
    """Channel with its two ends: ``source`` and ``target`` are indices on axis pp."""

    channel: Channel
    source: int
    target: int


def state_link(source: int, target: int) -> Link:
    """Returns the link that sends training state from index ``source`` to ``target`` of axis pp, between two steps."""
    return Link(Channel("state", source, target), source, target)


def link_rounds(links: Iterable[Link]) -> list[tuple[Link, ...]]:
    """Divides ``links`` into rounds such that no rank is in two links of the same round.

    The process groups of one round can be created simultaneously. Links for training state (flow "state") use the group
    of axis pp and are omitted.
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
    """Interface for communication along the axes of a grid.

    Methods with the result ``Wait`` return a function that blocks until the call is complete. In
    methods with arguments ``full`` and ``shard``, ``shard`` may be a view of this rank's slice of ``full``.
    """

    def all_reduce(self, tensor: Tensor, axis: Axis, op: Reduction = "sum") -> Wait:
        """Starts to sum ``tensor`` in place over ``axis``; returns a function that waits.

        ``op`` "max" takes the elementwise maximum instead of the sum.
        """

    def reduce_scatter(self, shard: Tensor, full: Tensor, axis: Axis) -> Wait:
        """Starts to sum ``full`` over ``axis`` and write this rank's slice to ``shard``; returns a function that waits.

        ``full`` has one slice of equal size for each index of ``axis``, and may be overwritten.
        """

    def all_gather(self, full: Tensor, shard: Tensor, axis: Axis) -> Wait:
        """Starts to copy the ``shard`` of every rank of ``axis`` into ``full``, in order of index.

        Returns a function that waits.
        """

    def connect_data(self, members: tuple[int, ...]) -> None:
        """Creates the ``all_to_all`` group of indices ``members`` of the data axis.

        Every rank of the world calls it, with the same ``members``.
        """
        return

    def all_to_all(self, received: Tensor, given: Tensor, members: tuple[int, ...], axis: Axis) -> Wait:
        """Starts to send slice i of ``given`` to index ``members[i]`` of ``axis``; returns a function that waits.

        Slice i of ``received`` comes from index ``members[i]``; all slices have equal size. ``members`` has all
        indices of ``axis``; on the data axis, after ``connect_data(members)``, it may have only some.
        """

    def exchange(self, received: Tensor, given: Tensor, gets: Sequence[int], gives: Sequence[int], axis: Axis) -> Wait:
        """Starts to send ``gives[i]`` rows of ``given`` to each index i of ``axis``; returns a function that waits.

        ``received`` takes ``gets[i]`` rows from each index i. In both tensors the rows are in order of index.
        """

    def open_gathers(self, within: int | None = None, axis: Axis | None = None) -> None:
        """Creates the process groups that ``gather_parameters`` uses with the same arguments; every rank calls it.

        ``within``: number of consecutive indices of the data axis in a group; None: all. ``axis``: axis of which all
        ranks are a group; ``within`` is then unused.
        """
        return

    def gather_parameters(
        self, pairs: Sequence[tuple[Tensor, Tensor]], within: int | None = None, axis: Axis | None = None
    ) -> Wait:
        """Starts to all-gather ``shard`` into ``full`` for each pair (``full``, ``shard``); returns a function that
        waits.

        It uses the process group that ``open_gathers`` created for ``within`` and ``axis``.
        """

    def exchange_gathers(self, data: bytes, within: int) -> Sequence[bytes]:
        """All-gathers ``data`` (equal length on all ranks) in host memory, in groups of ``within`` consecutive data
        ranks.

        Returns the bytes of each rank, in order of index. No device synchronizes.
        """

    def send(self, tensor: Tensor, to: int, channel: Channel) -> Wait:
        """Starts to send ``tensor`` to index ``to`` of axis pp over ``channel``; returns a function that waits.

        ``tensor`` must not change before the wait ends.
        """

    def receive(self, tensor: Tensor, source: int, channel: Channel) -> Wait:
        """Starts to receive the next message of ``channel`` from index ``source`` of axis pp into ``tensor``.

        Returns a function that waits.
        """

    def connect(self, stages: tuple[int, ...]) -> None:
        """Creates the group of ``sum_over_stages`` for indices ``stages`` of axis pp; all ranks pass the same ones."""
        return

    def link(self, links: Sequence[Link]) -> None:
        """Creates the process groups for messages over ``links``; every rank calls it with the same ``links``."""
        return

    def sum_over_stages(self, tensor: Tensor, stages: tuple[int, ...]) -> Wait:
        """Starts to sum ``tensor`` in place over the indices ``stages`` of axis pp; returns a function that waits."""

    def share_bytes(self, axis: Axis, size: int) -> SharedBytes | None:
        """Allocates ``size`` bytes on each rank of ``axis``, writable by all its ranks; every rank calls it.

        Returns None on all ranks if the devices cannot share memory.
        """
        return None

    def close(self) -> None:
        """Destroys the process groups and releases shared memory."""
        return


class RecordingBackend(Backend):
    """Backend that communicates nothing, so that one process can make the calls of any rank; :class:`Comm` records
    them.
    """

    def __init__(self, grid: Grid) -> None:
        self._grid = grid

    def all_reduce(self, tensor: Tensor, axis: Axis, op: Reduction = "sum") -> Wait:
        """Leaves ``tensor`` unchanged; returns a wait that does nothing."""
        return lambda: None

    def reduce_scatter(self, shard: Tensor, full: Tensor, axis: Axis) -> Wait:
        """Copies this rank's slice of ``full`` to ``shard``; returns a wait that does nothing."""
        shard.copy_(self._own(full, axis))
        return lambda: None

    def all_gather(self, full: Tensor, shard: Tensor, axis: Axis) -> Wait:
        """Copies ``shard`` to this rank's slice of ``full``, and leaves the other slices unchanged.

        Returns a wait that does nothing.
        """
        self._own(full, axis).copy_(shard)
        return lambda: None

    def all_to_all(self, received: Tensor, given: Tensor, members: tuple[int, ...], axis: Axis) -> Wait:
        """Copies this rank's own slice of ``given`` to ``received``, and sets all other slices to zero.

        Returns a wait that does nothing.
        """
        own, slices = members.index(self._grid.index(axis)), received.view(len(members), -1)
        slices.zero_()
        slices[own].copy_(given.view(len(members), -1)[own])
        return lambda: None

    def exchange(self, received: Tensor, given: Tensor, gets: Sequence[int], gives: Sequence[int], axis: Axis) -> Wait:
        """Copies this rank's own rows of ``given`` to ``received``, and sets all other rows to zero.

        Returns a wait that does nothing.
        """
        own = self._grid.index(axis)
        received.zero_()
        before = slice(sum(gets[:own]), sum(gets[: own + 1])), slice(sum(gives[:own]), sum(gives[: own + 1]))
        received[before[0]].copy_(given[before[1]])
        return lambda: None

    def gather_parameters(
        self, pairs: Sequence[tuple[Tensor, Tensor]], within: int | None = None, axis: Axis | None = None
    ) -> Wait:
        """Copies each ``shard`` to this rank's slice of its ``full``, and leaves the other slices unchanged.

        Returns a wait that does nothing.
        """
        line = axis or self._grid.shard_line
        ranks = within or self._grid.size(line)
        for full, shard in pairs:
            full.view(ranks, -1)[self._grid.index(line) % ranks].copy_(shard)
        return lambda: None

    def exchange_gathers(self, data: bytes, within: int) -> Sequence[bytes]:
        """Returns ``within`` references to ``data``, as if every rank had sent the same bytes."""
        return [data] * within

    def sum_over_stages(self, tensor: Tensor, stages: tuple[int, ...]) -> Wait:
        """Leaves ``tensor`` unchanged; returns a wait that does nothing."""
        return lambda: None

    def send(self, tensor: Tensor, to: int, channel: Channel) -> Wait:
        """Sends nothing; returns a wait that does nothing."""
        return lambda: None

    def receive(self, tensor: Tensor, source: int, channel: Channel) -> Wait:
        """Fills ``tensor`` with zeros instead of receiving a message; returns a wait that does nothing."""
        tensor.zero_()
        return lambda: None

    def _own(self, full: Tensor, axis: Axis) -> Tensor:
        return full.view(self._grid.size(axis), -1)[self._grid.index(axis)]
