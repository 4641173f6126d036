"""Collectives in the order of streams, as NCCL has it, between ranks that are threads.

A collective runs on a stream of its own, which waits for what the current stream was given before; the wait makes the
current stream wait for it, not the host. Between the two the result holds NaN: whoever reads it is too early.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from engine.parallel.comm.backend import Backend, Channel, Link, Reduction, Wait
from engine.parallel.comm.symmetric_memory import SharedBytes
from engine.parallel.comm.world import World
from engine.parallel.grid import Axis, Grid


@dataclass
class StreamedBackend:
    """The ``inner`` backend, whose tensors are on ``device``."""

    inner: Backend
    device: torch.device
    forgets: Callable[[str], bool] = lambda call: False
    """Whether the current stream does not wait for a call: a fault to be found."""
    streams: defaultdict[Any, torch.Stream] = field(init=False)
    """By what NCCL has one stream for: an axis, a channel."""

    def __post_init__(self) -> None:
        self.streams = defaultdict(lambda: torch.Stream(device=self.device))

    def all_reduce(self, tensor: Tensor, axis: Axis, op: Reduction = "sum") -> Wait:
        """Reduce in place."""
        return self._run(axis, "all_reduce", lambda: self.inner.all_reduce(tensor, axis, op), tensor)

    def reduce_scatter(self, shard: Tensor, full: Tensor, axis: Axis) -> Wait:
        """Reduce into ``shard``."""
        return self._run(axis, "reduce_scatter", lambda: self.inner.reduce_scatter(shard, full, axis), shard)

    def all_gather(self, full: Tensor, shard: Tensor, axis: Axis) -> Wait:
        """Gather into ``full``."""
        return self._run(axis, "all_gather", lambda: self.inner.all_gather(full, shard, axis), *others(full, shard))

    def gather_parameters(
        self, pairs: Sequence[tuple[Tensor, Tensor]], within: int | None = None, axis: Axis | None = None
    ) -> Wait:
        """Gather all pairs on a stream of their own."""
        late = [part for pair in pairs for part in others(*pair)]
        key = ("gathers", within, axis)
        return self._run(key, "gather_parameters", lambda: self.inner.gather_parameters(pairs, within, axis), *late)

    def sum_over_stages(self, tensor: Tensor, stages: tuple[int, ...]) -> Wait:
        """Sum in place."""
        return self._run(stages, "sum_over_stages", lambda: self.inner.sum_over_stages(tensor, stages), tensor)

    def send(self, tensor: Tensor, to: int, channel: Channel) -> Wait:
        """Send; ``tensor`` is read when the stream comes to it."""
        return self._run(channel, "send", lambda: self.inner.send(tensor, to, channel))

    def receive(self, tensor: Tensor, source: int, channel: Channel) -> Wait:
        """Receive into ``tensor``."""
        return self._run(channel, "receive", lambda: self.inner.receive(tensor, source, channel), tensor)

    def _run(self, key: Any, call: str, issue: Callable[[], Wait], *late: Tensor) -> Wait:
        stream = self.streams[key]
        stream.wait_stream(torch.accelerator.current_stream(self.device))
        with stream, torch.no_grad():
            complete = issue()
            for tensor in late:
                spoil(tensor)

        def finish(kept: Callable[[], Wait] = issue) -> None:
            """Complete it; ``kept`` has its tensors, whose memory NCCL too keeps until the wait."""
            with stream:
                complete()
            if not self.forgets(call):
                torch.accelerator.current_stream(self.device).wait_stream(stream)

        return finish

    def connect_data(self, members: tuple[int, ...]) -> None:
        """As inside."""
        self.inner.connect_data(members)

    def all_to_all(self, received: Tensor, given: Tensor, members: tuple[int, ...], axis: Axis = "dp") -> Wait:
        """Exchange into ``received``."""
        return self._run(
            (f"{axis} slices", members),
            "all_to_all",
            lambda: self.inner.all_to_all(received, given, members, axis),
            received,
        )

    def exchange(self, received: Tensor, given: Tensor, gets: Sequence[int], gives: Sequence[int], axis: Axis) -> Wait:
        """Exchange into ``received``."""
        return self._run(axis, "exchange", lambda: self.inner.exchange(received, given, gets, gives, axis), received)

    def open_gathers(self, within: int | None = None, axis: Axis | None = None) -> None:
        """As inside."""
        self.inner.open_gathers(within, axis)

    def exchange_gathers(self, data: bytes, within: int) -> Sequence[bytes]:
        """As inside: it is the hosts that talk."""
        return self.inner.exchange_gathers(data, within)

    def share_bytes(self, axis: Axis, size: int) -> SharedBytes | None:
        """As inside."""
        return self.inner.share_bytes(axis, size)

    def connect(self, stages: tuple[int, ...]) -> None:
        """As inside."""
        self.inner.connect(stages)

    def link(self, links: Sequence[Link]) -> None:
        """As inside."""
        self.inner.link(links)

    def close(self) -> None:
        """As inside."""
        self.inner.close()


def streamed(world: World, forgets: Callable[[str], bool] = lambda call: False) -> World:
    """``world`` with its collectives in the order of streams."""
    within = world.connect
    assert within is not None

    def connect(grid: Grid) -> StreamedBackend:
        return StreamedBackend(within(grid), world.device, forgets)

    return replace(world, connect=connect)


def others(full: Tensor, shard: Tensor) -> list[Tensor]:
    """The parts of ``full`` that a gather writes: all but the slice that is ``shard`` itself."""
    pieces = full.view(-1, shard.numel()).unbind() if shard.numel() else ()
    return [piece for piece in pieces if piece.data_ptr() != shard.data_ptr()]


def spoil(tensor: Tensor) -> None:
    """Write what nobody can take for a result."""
    if tensor.is_floating_point():
        tensor.fill_(float("nan"))
    elif tensor.dtype != torch.bool:
        tensor.fill_(torch.iinfo(tensor.dtype).max)
