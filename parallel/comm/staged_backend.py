"""Communication of accelerators with a process group for host tensors only: copies through pinned memory.

    device            host                      other rank
    tensor -- copy --> pinned memory -- gloo --> pinned memory -- copy --> tensor

gloo reads and writes the addresses that it is given, and addresses of a device are none of the host's. Ranks of a gloo
group that the user has started may share a GPU this way, which ranks of NCCL may not.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.kernels.device import host_memory_like
from engine.parallel.comm.backend import Backend, Channel, Link, Reduction, Wait
from engine.parallel.comm.torch_backend import TorchBackend, carries_tensors_of
from engine.parallel.grid import Axis, Grid


def open_backend(grid: Grid, device: torch.device) -> Backend:
    """Opens this process's backend for tensors on ``device``, in the existing default process group.

    The backend copies tensors through host memory if torch's collectives cannot move tensors of ``device``.
    """
    if carries_tensors_of(device):
        return TorchBackend(grid, device)
    return StagedBackend(TorchBackend(grid, torch.device("cpu")))


class StagedBackend(Backend):
    """Backend for a device without collectives: it copies tensors to host memory for ``inner``, a CPU backend.

    Each call synchronizes the device, and each returned wait blocks the host. ``share_bytes`` returns None.
    """

    def __init__(self, inner: Backend) -> None:
        self._inner = inner

    def all_reduce(self, tensor: Tensor, axis: Axis, op: Reduction = "sum") -> Wait:
        """Starts to sum a host copy of ``tensor`` over ``axis``; ``op`` "max" takes the maximum instead.

        Returns a function that waits and then copies the result to ``tensor``.
        """
        host = _on_host(tensor)
        return _brought(self._inner.all_reduce(host, axis, op), (tensor, host))

    def reduce_scatter(self, shard: Tensor, full: Tensor, axis: Axis) -> Wait:
        """Starts to sum a host copy of ``full`` over ``axis``.

        Returns a function that waits and then copies this rank's slice of the sum to ``shard``.
        """
        host = host_memory_like(shard)
        return _brought(self._inner.reduce_scatter(host, _on_host(full), axis), (shard, host))

    def all_gather(self, full: Tensor, shard: Tensor, axis: Axis) -> Wait:
        """Starts to all-gather host copies of each rank's ``shard`` over ``axis``.

        Returns a function that waits and then copies the result to ``full``.
        """
        host = host_memory_like(full)
        return _brought(self._inner.all_gather(host, _on_host(shard), axis), (full, host))

    def connect_data(self, members: tuple[int, ...]) -> None:
        """Creates the group for ``all_to_all`` among the indices ``members`` of the data axis, in the CPU backend."""
        self._inner.connect_data(members)

    def all_to_all(self, received: Tensor, given: Tensor, members: tuple[int, ...], axis: Axis) -> Wait:
        """Starts to send slice i of a host copy of ``given`` to index ``members[i]`` of ``axis``.

        Returns a function that waits and then copies the received slices to ``received``, in order of ``members``.
        """
        host = host_memory_like(received)
        return _brought(self._inner.all_to_all(host, _on_host(given), members, axis), (received, host))

    def exchange(self, received: Tensor, given: Tensor, gets: Sequence[int], gives: Sequence[int], axis: Axis) -> Wait:
        """Starts to send ``gives[i]`` rows of a host copy of ``given`` to each index i of ``axis``.

        Returns a function that waits and then copies the received rows, ``gets[i]`` from each index i, to ``received``.
        """
        host = host_memory_like(received)
        return _brought(self._inner.exchange(host, _on_host(given), gets, gives, axis), (received, host))

    def open_gathers(self, within: int | None = None, axis: Axis | None = None) -> None:
        """Creates, in the CPU backend, the groups that :meth:`gather_parameters` uses with the same arguments."""
        self._inner.open_gathers(within, axis)

    def gather_parameters(
        self, pairs: Sequence[tuple[Tensor, Tensor]], within: int | None = None, axis: Axis | None = None
    ) -> Wait:
        """Starts to all-gather a host copy of ``shard`` for each pair (``full``, ``shard``) of ``pairs``.

        It uses the group that ``open_gathers`` created for ``within`` and ``axis``. Returns a function that waits and
        then copies each result to its ``full``.
        """
        hosts = [(host_memory_like(full), _on_host(shard)) for full, shard in pairs]
        filled = [(full, host) for (full, _), (host, _) in zip(pairs, hosts, strict=True)]
        return _brought(self._inner.gather_parameters(hosts, within, axis), *filled)

    def exchange_gathers(self, data: bytes, within: int) -> Sequence[bytes]:
        """All-gathers ``data``, of equal length on all ranks, in groups of ``within`` consecutive data ranks.

        Returns the bytes of each rank, in order of index.
        """
        return self._inner.exchange_gathers(data, within)

    def send(self, tensor: Tensor, to: int, channel: Channel) -> Wait:
        """Starts to send a host copy of ``tensor`` to index ``to`` of axis pp; returns a function that waits."""
        return self._inner.send(_on_host(tensor), to, channel)

    def receive(self, tensor: Tensor, source: int, channel: Channel) -> Wait:
        """Starts to receive the next message of ``channel`` from index ``source`` of axis pp into host memory.

        Returns a function that waits and then copies the message to ``tensor``.
        """
        host = host_memory_like(tensor)
        return _brought(self._inner.receive(host, source, channel), (tensor, host))

    def connect(self, stages: tuple[int, ...]) -> None:
        """Creates the group for ``sum_over_stages`` among the indices ``stages`` of axis pp, in the CPU backend."""
        self._inner.connect(stages)

    def link(self, links: Sequence[Link]) -> None:
        """Creates the groups for messages over ``links``, in the CPU backend."""
        self._inner.link(links)

    def sum_over_stages(self, tensor: Tensor, stages: tuple[int, ...]) -> Wait:
        """Starts to sum a host copy of ``tensor`` over the indices ``stages`` of axis pp.

        Returns a function that waits and then copies the sum to ``tensor``.
        """
        host = _on_host(tensor)
        return _brought(self._inner.sum_over_stages(host, stages), (tensor, host))

    def close(self) -> None:
        """Closes the CPU backend, with its groups and shared memory."""
        self._inner.close()


@torch.no_grad()
def _on_host(tensor: Tensor) -> Tensor:
    """Copy ``tensor`` to pinned memory; the host waits until it is there."""
    return host_memory_like(tensor).copy_(tensor)


def _brought(wait: Wait, *filled: tuple[Tensor, Tensor]) -> Wait:
    """Returns a wait that ends once each tensor has the content of its copy on the host."""

    @torch.no_grad()
    def finish() -> None:
        wait()
        for tensor, host in filled:
            tensor.copy_(host)

    return finish
