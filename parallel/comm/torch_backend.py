"""Communication between real processes: NCCL on GPUs, gloo on CPUs."""

import atexit
import logging
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from engine.errors import EngineError, first_line
from engine.kernels.device import collectives_for, finish, is_host
from engine.parallel.comm.backend import Channel, Link, Reduction, Wait, link_rounds
from engine.parallel.comm.host_barrier import HostBarrier, host_identity, open_neighbours
from engine.parallel.comm.shared_memory import MESSAGE_BYTES, HostMessages, SharedMemory, shared_bytes
from engine.parallel.comm.symmetric_memory import SharedBytes
from engine.parallel.comm.world import OwnedGroups, color_rounds, shares_memory
from engine.parallel.grid import Axis, Grid, axis_groups

logger = logging.getLogger("trine")


_HOST = torch.device("cpu")


class _DataMembers(NamedTuple):
    """Indices of the shard line that exchange messages."""

    members: tuple[int, ...]


class _DataGathers(NamedTuple):
    """Gathers of parameters over so many data ranks side by side, or their agreement on these, between hosts."""

    purpose: Literal["gathers", "agreement"]
    within: int


class _AxisGathers(NamedTuple):
    """Gathers of parameters over an axis other than the shard line."""

    axis: Axis


_Key = Axis | tuple[int, ...] | _DataMembers | _DataGathers | _AxisGathers | Channel
"""An axis, other groups for gathers of parameters, indices of axis pp that sum, indices of the shard line that
exchange, or a channel of messages."""


class TorchBackend:
    """Backend between processes, over torch.distributed: one process group per axis of several ranks.

    If ``linked`` (by default with NCCL), each pipeline channel of activations or gradients has a group of its own;
    otherwise all channels share the group of axis pp. ``close`` destroys the groups that this backend has opened.

    On one host, shared memory replaces the group for tensor ranks on CPUs, and for data ranks in
    :meth:`exchange_gathers`.
    """

    def __init__(self, grid: Grid, device: torch.device, linked: bool | None = None) -> None:
        self._device = device
        self._linked = collectives_for(device) != "gloo" if linked is None else linked
        self._grid, self._here = grid, grid.coord().pp
        self._owned = OwnedGroups()
        self._groups: dict[_Key, dist.ProcessGroup | None] = {"world": dist.group.WORLD}
        self._shared: dict[Axis, SharedMemory] = {}
        self._agreement: HostMessages | None = None
        """Of the data ranks that gather together; None where they are on several hosts."""
        atexit.register(self._groups.clear)
        try:
            self._open_axes()
        except BaseException:
            self.close()
            raise

    def _open_axes(self) -> None:
        """Makes the groups of the axes; an axis of one rank has none, because nothing is sent over it."""
        grid = self._grid
        if not self._linked and grid.world_size > 1:
            self._groups["world"] = self._owned.open(range(grid.world_size))
        for axis, used in axis_groups(grid).items():
            self._groups[axis] = self._along(axis) if used == axis != "world" else self._groups[used]
        if is_host(self._device) and grid.tp > 1:
            self._shared = self._share("tp")

    def _along(self, axis: Axis) -> dist.ProcessGroup | None:
        return self._open(self._grid.groups(axis), self._grid.peers(axis))

    def _open(self, groups: Iterable[tuple[int, ...]], own: tuple[int, ...] | None) -> dist.ProcessGroup | None:
        """Creates the groups on all ranks and returns this rank's own; None if it is in none of them."""
        if not self._linked:
            return self._owned.open(own)
        made = [self._owned.open(own if own in each else None) for each in color_rounds(groups)]
        return next((group for group in made if group is not None), None)

    def _share(self, axis: Axis) -> dict[Axis, SharedMemory]:
        """Shared memory for ``axis`` and for any other axis of the same ranks; empty unless they run on one host."""
        group, grid = self._groups[axis], self._grid
        assert group is not None
        barrier = _neighbours(group, shared_bytes(grid.size(axis)), self._device)
        if barrier is None:
            return {}
        found, alike = SharedMemory(barrier), ("tp", "replica", "world")
        return {name: found for name in alike if grid.peers(name) == grid.peers(axis)}

    def shares(self, axis: Axis) -> bool:
        """Returns True if collectives of ``axis`` use shared host memory instead of a process group."""
        return axis in self._shared

    def share_bytes(self, axis: Axis, size: int) -> SharedBytes | None:
        """Allocates ``size`` bytes per rank of ``axis``: shared host memory on CPUs, torch's symmetric memory on GPUs.

        Returns None on all ranks if the ranks cannot share memory.
        """
        group = self._groups[axis]
        assert group is not None
        if not is_host(self._device):
            return _peer_memory(group, size, self._device)
        ranks = self._grid.size(axis)
        barrier = _neighbours(group, ranks * size, self._device)
        if barrier is None:
            return None
        whole = torch.frombuffer(barrier.memory, dtype=torch.uint8).view(ranks, size)
        return SharedBytes(parts=tuple(whole), index=barrier.index, close=barrier.close, links=barrier.descriptors)

    def connect_data(self, members: tuple[int, ...]) -> None:
        """Creates the groups for ``all_to_all`` among the ranks with the indices ``members`` on the data axis.

        Every rank of the world calls it, with the same ``members``.
        """
        if len(members) in (1, self._grid.size(self._grid.shard_line)) or _DataMembers(members) in self._groups:
            return
        axis = self._grid.shard_line
        groups = (tuple(line[index] for index in members) for line in self._grid.groups(axis))
        line, here = self._grid.peers(axis), self._grid.index(axis)
        own = tuple(line[index] for index in members) if here in members else None
        self._groups[_DataMembers(members)] = self._open(groups, own)

    def all_to_all(self, received: Tensor, given: Tensor, members: tuple[int, ...], axis: Axis) -> Wait:
        """Starts to send slice i of ``given`` to index ``members[i]`` of ``axis``; returns a function that waits.

        Slice i of ``received`` comes from index ``members[i]``. Slices have equal size.
        """
        group = self._groups[axis if len(members) == self._grid.size(axis) else _DataMembers(members)]
        return _all_to_all(received, given, group)

    def exchange(self, received: Tensor, given: Tensor, gets: Sequence[int], gives: Sequence[int], axis: Axis) -> Wait:
        """Starts to send ``gives[i]`` rows of ``given`` to each index i of ``axis``; returns a function that waits.

        ``received`` takes ``gets[i]`` rows from each index i, in order of index.
        """
        group = self._groups[axis]
        return _finisher(dist.all_to_all_single(received, given, list(gets), list(gives), group=group, async_op=True))

    def open_gathers(self, within: int | None = None, axis: Axis | None = None) -> None:
        """Creates a process group of its own for :meth:`gather_parameters`; every rank calls it.

        The group consists of ``within`` neighbouring data ranks (default: all), or of all ranks of ``axis`` if given.
        """
        if axis is not None:
            self._groups[_AxisGathers(axis)] = self._along(axis)
            return
        axis, line = self._grid.shard_line, self._grid.peers(self._grid.shard_line)
        size = within or len(line)
        starts = range(0, len(line), size)
        groups = (peers[start : start + size] for peers in self._grid.groups(axis) for start in starts)
        first = self._grid.index(axis) // size * size
        own = line[first : first + size]
        self._groups[_DataGathers("gathers", size)] = group = self._open(groups, own)
        hosts = self._owned.open(own, backend="gloo") if self._linked else group
        self._groups[_DataGathers("agreement", size)] = hosts
        if hosts is not None and size == self._grid.size(self._grid.sharding):  # parts of it agree on nothing
            barrier = _neighbours(hosts, 2 * size * MESSAGE_BYTES, _HOST)
            self._agreement = None if barrier is None else HostMessages(barrier)

    def gather_parameters(
        self, pairs: Sequence[tuple[Tensor, Tensor]], within: int | None = None, axis: Axis | None = None
    ) -> Wait:
        """Starts to all-gather ``shard`` into ``full`` for each pair (``full``, ``shard``).

        It uses the group that ``open_gathers`` created for ``within`` and ``axis``. Returns a function that waits.
        """
        line = _DataGathers("gathers", within or self._grid.size(self._grid.shard_line))
        group = self._groups[line if axis is None else _AxisGathers(axis)]
        return _all_of([_all_gather(full, shard, group) for full, shard in pairs])

    def exchange_gathers(self, data: bytes, within: int) -> Sequence[bytes]:
        """All-gathers ``data`` (equal length on all ranks) between the host memories of ``within`` neighbouring data
        ranks.

        Returns the bytes of each rank, in order of index.
        """
        group = self._groups[_DataGathers("agreement", within)]
        assert group is not None
        return _exchange(group, _HOST, data) if self._agreement is None else self._agreement.exchange(data)

    def connect(self, stages: tuple[int, ...]) -> None:
        """Creates the groups in which ``sum_over_stages`` sums over ``stages``; all ranks pass the same ``stages``."""
        if stages not in self._groups:
            self._groups[stages] = self._among(stages)

    def _among(self, stages: tuple[int, ...]) -> dist.ProcessGroup | None:
        groups = (tuple(line[stage] for stage in stages) for line in self._grid.groups("pp"))
        line = self._grid.peers("pp")
        return self._open(groups, tuple(line[stage] for stage in stages) if self._here in stages else None)

    def sum_over_stages(self, tensor: Tensor, stages: tuple[int, ...]) -> Wait:
        """Starts to sum ``tensor`` in place over the indices ``stages`` of axis pp; returns a function that waits."""
        return _finisher(dist.all_reduce(tensor, group=self._groups[stages], async_op=True))

    def link(self, links: Sequence[Link]) -> None:
        """Creates and connects a separate process group for each link in ``links``, except links for training state;
        does nothing unless ``linked``.

        Every rank calls it with the same ``links``.
        """
        new = [link for link in links if link.channel not in self._groups]
        for links_at_once in link_rounds(new) if self._linked else ():
            own = next((link for link in links_at_once if self._here in link[1:]), None)
            group = self._pairs(links_at_once, own)
            for link in links_at_once:
                self._groups[link.channel] = group if link == own else None
            if own is not None:
                self._touch(own)

    def _pairs(self, links: Sequence[Link], own: Link | None) -> dist.ProcessGroup | None:
        """Create the groups of links without a common end; returns that of this rank's own one."""
        pairs = [tuple(sorted((link.source, link.target))) for link in links]
        groups = (tuple(line[stage] for stage in pair) for line in self._grid.groups("pp") for pair in pairs)
        line = self._grid.peers("pp")
        return self._open(groups, None if own is None else tuple(sorted((line[own.source], line[own.target]))))

    def _touch(self, link: Link) -> None:
        token = torch.zeros(1, device=self._device)
        if self._here == link.source:
            self.send(token, link.target, link.channel)()
        else:
            self.receive(token, link.source, link.channel)()

    def send(self, tensor: Tensor, to: int, channel: Channel) -> Wait:
        """Starts to send ``tensor`` to index ``to`` of axis pp over ``channel``; returns a function that waits."""
        group, index, tag = self._way(to, channel)
        return _finisher(group.send([tensor], index, tag))  # isend looks up the group for every message

    def receive(self, tensor: Tensor, source: int, channel: Channel) -> Wait:
        """Starts to receive the next message of ``channel`` from index ``source`` of axis pp into ``tensor``.

        Returns a function that waits.
        """
        group, index, tag = self._way(source, channel)
        return _finisher(group.recv([tensor], index, tag))

    def _way(self, other: int, channel: Channel) -> tuple[dist.ProcessGroup, int, int]:
        """Group of a channel, index of pipeline rank ``other`` in it, and tag: gloo has tags, NCCL needs groups.

        State is sent between steps, by all ranks in one order, so it needs no group of its own.
        """
        paired = self._linked and channel.flow != "state"
        group = self._groups.get(channel if paired else "pp")
        if group is None:
            raise EngineError(
                f"stages {channel.source} and {channel.target} are not linked, because no value passed between them in "
                "the example batch; pass an example_batch that takes the same path through the model."
            )
        place = channel.source * _MOST_PLACES + channel.target
        tag = 3 * place + ("state", "forward", "backward").index(channel.flow)
        return group, int(other > self._here) if paired else other, tag

    def close(self) -> None:
        """Destroys the process groups and releases shared memory. A second call does nothing."""
        atexit.unregister(self._groups.clear)
        self._groups.clear()
        for shared in (*self._shared.values(), *([self._agreement] if self._agreement is not None else ())):
            shared.close()
        self._shared.clear()
        self._agreement = None
        self._owned.close()

    def all_reduce(self, tensor: Tensor, axis: Axis, op: Reduction = "sum") -> Wait:
        """Starts to sum ``tensor`` in place over ``axis``; returns a function that waits.

        ``op`` "max" takes the elementwise maximum instead of the sum.
        """
        if axis in self._shared:
            return self._shared[axis].all_reduce(tensor, op)
        reduction = dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX
        return _finisher(dist.all_reduce(tensor, reduction, self._groups[axis], async_op=True))

    def reduce_scatter(self, shard: Tensor, full: Tensor, axis: Axis) -> Wait:
        """Starts to sum ``full`` over ``axis`` into ``shard``, this rank's slice of the sum; returns a function that
        waits.
        """
        if axis in self._shared:
            return self._shared[axis].reduce_scatter(shard, full)
        group = self._groups[axis]
        if dist.get_backend(group) == "gloo":
            return _reduce_scatter_by_exchange(shard, full, group)
        return _finisher(_REDUCE_SCATTER(shard, full, group=group, async_op=True))

    def all_gather(self, full: Tensor, shard: Tensor, axis: Axis) -> Wait:
        """Starts to copy the ``shard`` of every rank of ``axis`` into ``full``, in order of index.

        Returns a function that waits.
        """
        if axis in self._shared:
            return self._shared[axis].all_gather(full, shard)
        return _all_gather(full, shard, self._groups[axis])


def carries_tensors_of(device: torch.device) -> bool:
    """Returns True if process groups can move tensors of ``device``; gloo moves host tensors only."""
    return is_host(device) or dist.get_backend() != "gloo"


def _peer_memory(group: dist.ProcessGroup, size: int, device: torch.device) -> SharedBytes | None:
    """Memory of every GPU of the group that all of them write over NVLink; None where one of them cannot."""
    from torch.distributed import _symmetric_memory as symmetric_memory  # seconds of imports, for those who use it

    own, found = None, None
    try:
        own = symmetric_memory.empty(size, dtype=torch.uint8, device=device)
        found = symmetric_memory.rendezvous(own, group.group_name)
    except RuntimeError as error:
        logger.info("no symmetric memory between these GPUs: %s", first_line(error))
    multicast = 0 if found is None else int(found.multicast_ptr or 0)
    reached = torch.tensor([found is not None, multicast > 0], dtype=torch.int32, device=device)
    dist.all_reduce(reached, dist.ReduceOp.MIN, group)
    reaches, switches = reached.tolist()
    if not reaches or own is None or found is None:
        return None
    own.zero_()
    finish(device)
    dist.barrier(group, device_ids=[device.index or 0])
    index, ranks = dist.get_rank(group), dist.get_world_size(group)
    # its memory is not used: it knows when another process of this host ends; None where ranks are on several hosts
    neighbours = _neighbours(group, 1, device)
    return SharedBytes(
        parts=tuple(own if peer == index else found.get_buffer(peer, (size,), torch.uint8) for peer in range(ranks)),
        index=index,
        multicast=multicast if switches else 0,
        close=(lambda: None) if neighbours is None else neighbours.close,  # the memory goes with its tensor
        links={} if neighbours is None else neighbours.descriptors,
    )


def _neighbours(group: dist.ProcessGroup, size: int, device: torch.device) -> HostBarrier | None:
    """Opens memory of ``size`` bytes, with a barrier, that all ranks of a group share. All-gathers over the group, from
    ``device``. Returns None on all ranks if they run on several hosts, or if one of them may not share memory.
    """
    index, ranks, host = dist.get_rank(group), dist.get_world_size(group), host_identity(shares_memory())
    seconds: float = group._get_backend(device).options._timeout.total_seconds()
    return open_neighbours(index, ranks, host, size, seconds, partial(_exchange, group, device))


_MOST_PLACES = 1 << 14
"""Number of stages that tags can distinguish."""


# torch 2.13 renames the flat collectives and warns about the old names.
_RENAMED = hasattr(dist, "reduce_scatter_single")
_REDUCE_SCATTER = dist.reduce_scatter_single if _RENAMED else dist.reduce_scatter_tensor
_ALL_GATHER = dist.all_gather_single if _RENAMED else dist.all_gather_into_tensor


def _finisher(work: dist.Work | None) -> Wait:
    return work.wait if work is not None else lambda: None


def _exchange(group: dist.ProcessGroup, device: torch.device, data: bytes) -> list[bytes]:
    """All-gathers ``data`` over a group, from ``device``; returns the bytes of all ranks, in order of index."""
    own = torch.tensor(list(data), dtype=torch.uint8, device=device)
    full = own.new_empty(dist.get_world_size(group), len(data))
    _ALL_GATHER(full.view(-1), own, group=group)
    return [bytes(row) for row in full.tolist()]


def _all_gather(full: Tensor, shard: Tensor, group: dist.ProcessGroup | None) -> Wait:
    """All-gather; on gloo, large tensors go by messages from every rank to every other.

    gloo's own all-gather receives into a buffer and copies from there, which costs half as much as the sending.
    """
    if dist.get_backend(group) != "gloo" or full.numel() * full.element_size() < _WORTH_MESSAGES:
        return _finisher(_ALL_GATHER(full, shard, group=group, async_op=True))
    ranks = dist.get_world_size(group)
    return _swap(full.view(ranks, -1), [shard] * ranks, group)


_WORTH_MESSAGES = 1 << 16
"""Bytes from which gloo's copies, or ways of a link that wait for each other, cost more than more messages."""


def _all_to_all(received: Tensor, given: Tensor, group: dist.ProcessGroup | None) -> Wait:
    """Exchange slices; on gloo, large tensors go by messages, since its own exchange sends before it receives."""
    if dist.get_backend(group) != "gloo" or given.numel() * given.element_size() < _WORTH_MESSAGES:
        return _finisher(dist.all_to_all_single(received, given, group=group, async_op=True))
    ranks = dist.get_world_size(group)
    return _swap(received.view(ranks, -1), list(given.view(ranks, -1)), group)


def _swap(slices: Tensor, given: Sequence[Tensor], group: dist.ProcessGroup | None) -> Wait:
    """Send ``given[r]`` to the r-th rank; row r of ``slices`` comes from it.

    Receives are posted first. gloo announces them to their sender on the connection that data go through: behind data,
    the announcement keeps the other rank from sending until they are gone, and a link that could carry both ways at
    once carries one after the other.
    """
    index, ranks = dist.get_rank(group), dist.get_world_size(group)
    if slices[index].data_ptr() != given[index].data_ptr():
        slices[index].copy_(given[index])
    sources, targets = ([(index + way * distance) % ranks for distance in range(1, ranks)] for way in (-1, 1))
    waits = [_finisher(dist.irecv(slices[source], group=group, group_src=source)) for source in sources]
    waits += [_finisher(dist.isend(given[target], group=group, group_dst=target)) for target in targets]
    return _all_of(waits)


def _all_of(waits: Sequence[Wait]) -> Wait:
    def finish() -> None:
        for wait in waits:
            wait()

    return finish


def _reduce_scatter_by_exchange(shard: Tensor, full: Tensor, group: dist.ProcessGroup | None) -> Wait:
    """Reduce-scatter as an all-to-all followed by a local sum.

    gloo's own reduce-scatter is an all-reduce inside: it sends twice the bytes and refuses a shard that is in
    ``full``. Adding in rank order also makes the result independent of timing; half precision is added in fp32.
    """
    received, ranks = torch.empty_like(full), dist.get_world_size(group)
    work = _all_to_all(received, full, group)

    def finish() -> None:  # without the group, which an abandoned reduction would keep alive beyond the exit
        work()
        first, *others = received.view(ranks, -1)
        total = first.float() if first.element_size() < 4 else first
        for other in others:
            total += other
        shard.copy_(total)

    return finish
