"""The only door to ``torch.distributed``: every collective is named, recorded and counted here.

``Comm`` is what the engine calls; a ``Backend`` does the work, ``TorchBackend`` between real processes.
Collectives and messages are issued at once and finished by ``Pending.wait``.
"""

import atexit
import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from time import sleep
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from engine.errors import EngineError, first_line
from engine.parallel.backend import Backend, Channel, Link, Reduction, Wait
from engine.parallel.grid import Axis, Grid
from engine.parallel.shared_memory import SharedMemory, open_shared_memory
from engine.parallel.traffic import Op, Record, Tally, Traffic, sent_bytes
from engine.parallel.world import shares_memory

FLIGHT_RECORD_LENGTH = 256

_Key = Axis | Literal["gathers"] | tuple[int, ...] | Channel
"""An axis, the data axis once more for parameters, indices of axis pp that sum, or a channel of messages."""


class Pending:
    """A collective under way; ``wait`` finishes it and names it when it fails."""

    def __init__(
        self, wait: Wait | None = None, describe: Callable[[], str] = str, broken: Callable[[], None] | None = None
    ) -> None:
        self._wait = wait
        self._describe = describe
        self._broken = broken

    def wait(self) -> None:
        """Block (on a GPU: the current stream) until the result may be read.

        Raises:
            EngineError: the collective failed or timed out; the message names it and its ranks.
        """
        wait, self._wait = self._wait, None
        if wait is None:
            return
        try:
            wait()
        except RuntimeError as error:
            raise _named_failure(self._describe(), error, self._broken) from error


_HOLD_BACK_SECONDS = 10.0
"""A hundred times what the launcher takes to see that a process has ended, and to end the others."""


def _named_failure(what: str, error: RuntimeError, broken: Callable[[], None] | None) -> EngineError:
    """The error of a rank whose communication failed, most often because another rank has ended before.

    A launcher ends this process when it sees the other one end. Waiting for that keeps the traceback of the first
    failure the last one of the job; without a launcher nobody would come.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        if broken is not None:
            broken()
        sleep(_HOLD_BACK_SECONDS)
    cause = first_line(error)
    return EngineError(f"{what} failed: {cause}. A peer has probably stopped; look for the first traceback of the job.")


class Comm:
    """Named, counted collectives over the axes of a grid.

    ``tally`` sums calls and sent bytes by axis and label; ``records`` holds the last collectives in
    the order of their issue. An axis of one rank sends nothing and counts nothing.
    """

    def __init__(self, grid: Grid, backend: Backend) -> None:
        self.grid = grid
        self.broken: Callable[[], None] | None = None
        """Called before the wait for a launcher that is to end this process."""
        self.tally = Tally()
        self.records: deque[Record] = deque(maxlen=FLIGHT_RECORD_LENGTH)
        self._backend = backend
        self._sequence = 0
        self._closed = False

    def all_reduce(self, tensor: Tensor, axis: Axis, label: str, op: Reduction = "sum") -> Pending:
        """Sum ``tensor`` (any shape) in place over ``axis``; with ``op`` "max" leave the largest values."""
        return self._issue("all_reduce", tensor, axis, label, lambda: self._backend.all_reduce(tensor, axis, op))

    def sum_over_stages(self, tensor: Tensor, stages: tuple[int, ...], label: str) -> Pending:
        """Sum ``tensor`` in place over some indices of axis pp, for which ``connect`` was called before."""
        call = partial(self._backend.sum_over_stages, tensor, stages)
        return self._issue("all_reduce", tensor, "pp", label, call, len(stages))

    def connect(self, stages: tuple[int, ...]) -> None:
        """Prepare sums over these indices of axis pp. All ranks of the world call it, in the same order."""
        self._backend.connect(stages)

    def link(self, links: Sequence[Link]) -> None:
        """Prepare messages over these links. All ranks of the world call it alike."""
        self._backend.link(links)

    def send(self, tensor: Tensor, link: Link, label: str = "") -> Pending:
        """Send ``tensor`` over ``link``, label its flow or another; unchanged until the wait."""
        call = partial(self._backend.send, tensor, link.target, link.channel)
        return self._issue("send", tensor, "pp", label or link.channel.flow, call)

    def receive(self, tensor: Tensor, link: Link, label: str = "") -> Pending:
        """Fill ``tensor`` with what comes over ``link``; messages of one channel keep their order."""
        call = partial(self._backend.receive, tensor, link.source, link.channel)
        return self._issue("receive", tensor, "pp", label or link.channel.flow, call)

    def reduce_scatter(self, shard: Tensor, full: Tensor, axis: Axis, label: str) -> Pending:
        """Sum ``full`` [N*s] over ``axis``, leaving slice ``index`` in ``shard`` [s]; ``full`` may be spoiled."""
        return self._issue("reduce_scatter", full, axis, label, lambda: self._backend.reduce_scatter(shard, full, axis))

    def all_gather(self, full: Tensor, shard: Tensor, axis: Axis, label: str) -> Pending:
        """Concatenate every rank's ``shard`` [s] into ``full`` [N*s] over ``axis``."""
        return self._issue("all_gather", full, axis, label, lambda: self._backend.all_gather(full, shard, axis))

    def open_gathers(self) -> None:
        """Prepare ``gather_parameters``. All ranks of the world call it."""
        self._backend.open_gathers()

    def gather_parameters(self, pairs: Sequence[tuple[Tensor, Tensor]], label: str) -> Pending:
        """``all_gather`` of several (full, shard) over dp at once, apart from other traffic of that axis."""
        elements = sum(full.numel() for full, _ in pairs)
        size = sum(full.numel() * full.element_size() for full, _ in pairs)
        work = _Work("all_gather", elements, size, str(pairs[0][0].dtype).removeprefix("torch."))
        return self._launch(work, "dp", label, lambda: self._backend.gather_parameters(pairs), self.grid.dp)

    def close(self) -> None:
        """End the communication of this engine; the process group itself belongs to the :class:`World`."""
        self._closed = True
        self._backend.close()

    def _issue(
        self, op: Op, full: Tensor, axis: Axis, label: str, call: Callable[[], Wait], ranks: int | None = None
    ) -> Pending:
        ranks = self.grid.size(axis) if ranks is None else ranks
        dtype = str(full.dtype).removeprefix("torch.")
        work = _Work(op, full.numel(), full.numel() * full.element_size(), dtype)
        return self._launch(work, axis, label, call, ranks)

    def _launch(self, work: "_Work", axis: Axis, label: str, call: Callable[[], Wait], ranks: int) -> Pending:
        if ranks == 1:
            return Pending()
        if self._closed:
            raise EngineError(f"{label} was asked for after close(): this engine is over; make a new one.")
        self._sequence += 1
        record = Record(self._sequence, work.op, axis, label, work.elements, work.dtype)
        self.records.append(record)
        if work.op != "receive":
            self.tally.add(Traffic(axis, label, 1, sent_bytes(work.op, work.bytes, ranks)))

        def describe() -> str:
            kind = "message" if work.op in ("send", "receive") else "collective"
            return f"{kind} {record} between ranks {self.grid.peers(axis)} on rank {self.grid.rank}"

        try:
            return Pending(call(), describe, self.broken)
        except RuntimeError as error:
            raise _named_failure(describe(), error, self.broken) from error


@dataclass(frozen=True, slots=True)
class _Work:
    """What a collective or message moves."""

    op: Op
    elements: int
    bytes: int
    dtype: str


class TorchBackend:
    """Real processes: NCCL on GPUs, gloo on CPUs, one group per axis taken from a DeviceMesh.

    NCCL runs all messages of one group on one stream, in the order of their issue, and a message waits there for
    its other end. Ranks of a pipeline issue theirs in different orders, so with NCCL (``linked``) every channel has
    a group of its own, in which both ends agree on the order. gloo tells channels apart by tags.

    On CPUs tensor ranks of one host, who communicate most and run the same program, use memory that they share.
    """

    def __init__(self, grid: Grid, device: torch.device, linked: bool | None = None) -> None:
        self._device = device
        self._linked = device.type == "cuda" if linked is None else linked
        mesh = init_device_mesh(device.type, (grid.pp, grid.dp, grid.tp), mesh_dim_names=("pp", "dp", "tp"))
        self._grid, self._here = grid, grid.coord().pp
        self._groups: dict[_Key, dist.ProcessGroup | None] = {"world": dist.group.WORLD}
        axes: tuple[Axis, ...] = ("pp", "dp", "tp")
        for axis in axes:
            self._groups[axis] = mesh.get_group(axis)
        self._groups["replica"] = self._replica()
        self._shared = self._share("tp") if device.type == "cpu" and grid.tp > 1 else {}
        atexit.register(self._groups.clear)

    def _open(self, groups: list[tuple[int, ...]]) -> dist.ProcessGroup | None:
        """Make all ``groups``, which every rank has to do; the one that has this rank, or None."""
        made = [dist.new_group(list(group)) for group in groups]
        return next((m for m, group in zip(made, groups, strict=True) if self._grid.rank in group), None)

    def _share(self, axis: Axis) -> dict[Axis, SharedMemory]:
        """What replaces the group of ``axis``, and any other of the same ranks, if they run on one host."""
        group, grid = self._groups[axis], self._grid
        assert group is not None
        seconds = group._get_backend(self._device).options._timeout.total_seconds()
        exchange = partial(_exchange, group)
        found = open_shared_memory(grid.index(axis), grid.size(axis), shares_memory(), seconds, exchange)
        alike: tuple[Axis, ...] = ("tp", "replica", "world")
        return {} if found is None else {name: found for name in alike if grid.peers(name) == grid.peers(axis)}

    def _replica(self) -> dist.ProcessGroup | None:
        grid = self._grid
        if grid.dp == 1:
            return self._groups["world"]
        if grid.pp == 1 or grid.tp == 1:
            return self._groups["tp" if grid.pp == 1 else "pp"]
        return self._open(list(grid.groups("replica")))

    def open_gathers(self) -> None:
        """Make a second group of the data axis."""
        self._groups["gathers"] = self._open(list(self._grid.groups("dp")))

    def gather_parameters(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Wait:
        """Concatenate shards."""
        group = self._groups["gathers"]
        waits = [_all_gather(full, shard, group) for full, shard in pairs]

        def finish() -> None:
            for wait in waits:
                wait()

        return finish

    def connect(self, stages: tuple[int, ...]) -> None:
        """Make the groups of these stages, for every data and tensor coordinate."""
        if stages not in self._groups:
            groups = [tuple(peers[stage] for stage in stages) for peers in self._grid.groups("pp")]
            self._groups[stages] = self._open(groups)

    def sum_over_stages(self, tensor: Tensor, stages: tuple[int, ...]) -> Wait:
        """Sum ``tensor`` in place."""
        return _finisher(dist.all_reduce(tensor, group=self._groups[stages], async_op=True))

    def link(self, links: Sequence[Link]) -> None:
        """Make the groups of these links, and use each once, in one order for all ranks: NCCL connects at first use."""
        for link in sorted(set(links)) if self._linked else ():
            if link.channel not in self._groups:
                peers: list[tuple[int, ...]] = [
                    (line[link.source], line[link.target]) for line in self._grid.groups("pp")
                ]
                self._groups[link.channel] = self._open(peers)
                self._touch(link)

    def _touch(self, link: Link) -> None:
        token, here = torch.zeros(1, device=self._device), self._here
        if here == link.source:
            self.send(token, link.target, link.channel)()
        elif here == link.target:
            self.receive(token, link.source, link.channel)()

    def send(self, tensor: Tensor, to: int, channel: Channel) -> Wait:
        """Send to a rank of this pipeline."""
        group, tag = self._group_of(channel)
        return _finisher(group.send([tensor], self._index(to), tag))  # isend looks up the group for every message

    def receive(self, tensor: Tensor, source: int, channel: Channel) -> Wait:
        """Receive from a rank of this pipeline."""
        group, tag = self._group_of(channel)
        return _finisher(group.recv([tensor], self._index(source), tag))

    def _index(self, pp: int) -> int:
        """Of a pipeline rank in the group of a channel: that of the axis, or one of its own with two ranks."""
        return int(pp > self._here) if self._linked else pp

    def _group_of(self, channel: Channel) -> tuple[dist.ProcessGroup, int]:
        """Group and tag of a channel: gloo has tags, NCCL needs groups."""
        group = self._groups.get(channel if self._linked else "pp")
        if not self._linked and group is not None:
            place = channel.source * _MOST_PLACES + channel.target
            return group, 3 * place + ("state", "forward", "backward").index(channel.flow)
        if group is None:
            raise EngineError(
                f"stages {channel.source} and {channel.target} have not been linked, because no value passed between "
                "them in the example batch; pass an example_batch that takes the same path through the model."
            )
        return group, 0

    def close(self) -> None:
        """Let go of the groups. One that outlives the process group aborts the interpreter at its exit."""
        atexit.unregister(self._groups.clear)
        self._groups.clear()
        for shared in self._shared.values():
            shared.close()

    def all_reduce(self, tensor: Tensor, axis: Axis, op: Reduction = "sum") -> Wait:
        """Sum ``tensor``, or take the largest values, in place."""
        if axis in self._shared:
            return self._shared[axis].all_reduce(tensor, op)
        reduction = dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX
        return _finisher(dist.all_reduce(tensor, reduction, self._groups[axis], async_op=True))

    def reduce_scatter(self, shard: Tensor, full: Tensor, axis: Axis) -> Wait:
        """Sum slices; on gloo by exchanging slices and adding them in rank order."""
        if axis in self._shared:
            return self._shared[axis].reduce_scatter(shard, full)
        group = self._groups[axis]
        if dist.get_backend(group) == "gloo":
            return _reduce_scatter_by_exchange(shard, full, group)
        return _finisher(_REDUCE_SCATTER(shard, full, group=group, async_op=True))

    def all_gather(self, full: Tensor, shard: Tensor, axis: Axis) -> Wait:
        """Concatenate shards."""
        if axis in self._shared:
            return self._shared[axis].all_gather(full, shard)
        return _all_gather(full, shard, self._groups[axis])


_MOST_PLACES = 1 << 14
"""Stages that tags can tell apart."""

# torch 2.13 renames the flat collectives and warns about the old names.
_RENAMED = hasattr(dist, "reduce_scatter_single")
_REDUCE_SCATTER = dist.reduce_scatter_single if _RENAMED else dist.reduce_scatter_tensor
_ALL_GATHER = dist.all_gather_single if _RENAMED else dist.all_gather_into_tensor


def _finisher(work: dist.Work | None) -> Wait:
    return work.wait if work is not None else lambda: None


def _exchange(group: dist.ProcessGroup, data: bytes) -> list[bytes]:
    """The bytes of all ranks of a group, by index."""
    own = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    full = own.new_empty(dist.get_world_size(group), len(data))
    _ALL_GATHER(full.view(-1), own, group=group)
    return [bytes(row) for row in full.tolist()]


def _all_gather(full: Tensor, shard: Tensor, group: dist.ProcessGroup | None) -> Wait:
    """All-gather; on gloo, for what is worth it, by messages from every rank to every other.

    gloo's own gathers into memory of its own and copies from there, which costs as much as half of the sending.
    """
    if dist.get_backend(group) != "gloo" or full.numel() * full.element_size() < _WORTH_MESSAGES:
        return _finisher(_ALL_GATHER(full, shard, group=group, async_op=True))
    index, ranks = dist.get_rank(group), dist.get_world_size(group)
    slices = full.view(ranks, -1)
    if slices[index].data_ptr() != shard.data_ptr():
        slices[index].copy_(shard)
    waits = []
    for distance in range(1, ranks):
        to, source = (index + distance) % ranks, (index - distance) % ranks
        waits.append(_finisher(dist.isend(shard, group=group, group_dst=to)))
        waits.append(_finisher(dist.irecv(slices[source], group=group, group_src=source)))

    def finish() -> None:
        for wait in waits:
            wait()

    return finish


_WORTH_MESSAGES = 1 << 16
"""Bytes from which the copies cost more than the messages do."""


def _reduce_scatter_by_exchange(shard: Tensor, full: Tensor, group: dist.ProcessGroup | None) -> Wait:
    """Reduce-scatter as an all-to-all and a sum.

    gloo's own reduce-scatter is an all-reduce inside: it sends twice the bytes and refuses a shard
    that lies in ``full``. Adding in rank order also makes the result independent of timing; half
    precision is added in fp32.
    """
    received = torch.empty_like(full)
    work = _finisher(dist.all_to_all_single(received, full, group=group, async_op=True))

    def finish() -> None:
        work()
        first, *others = received.view(dist.get_world_size(group), -1)
        total = first.float() if first.element_size() < 4 else first
        for other in others:
            total += other
        shard.copy_(total)

    return finish
