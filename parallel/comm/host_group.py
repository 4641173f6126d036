"""Messages between host memories for background threads: a separate gloo group, independent of training.

Its messages are not counted as traffic of a step and do not wait for a GPU, and a rank that dies breaks only this
group. Messages between two ranks keep their order; an error names the rank that was waited for.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from engine.errors import EngineError, first_line
from engine.kernels.device import is_host
from engine.parallel.comm.world import OwnedGroups

MESSAGE_LIMIT = 1 << 28
"""Largest message in bytes; longer data is sent in several messages."""

Wait = Callable[[], None]


class HostGroup(Protocol):
    """Interface for sending bytes between the host memories of all ranks of the job."""

    rank: int
    size: int

    def send(self, data: memoryview, to: int) -> Wait:
        """Starts to send ``data`` to rank ``to``; returns a function that waits. ``data`` must not change before the
        wait ends.
        """

    def receive(self, target: memoryview, source: int) -> Wait:
        """Starts to receive ``len(target)`` bytes from rank ``source`` into ``target``.

        Returns a function that waits.
        """


class TorchHostGroup:
    """Group over gloo that sends bytes between host memories; its constructor is a collective of all ranks.

    Args:
        seconds: timeout of the constructor and of each message.
        purpose: use of the group, for error messages.

    Raises:
        EngineError: a rank did not join.
    """

    def __init__(self, rank: int, size: int, seconds: float, purpose: str = "read or write a checkpoint") -> None:
        self.rank, self.size = rank, size
        self._owned, self._closed = OwnedGroups(), False
        self.broken = False
        """A message was lost. Gloo then closes the connection for good, so the ranks need another group."""
        self._group: dist.ProcessGroup | None = None
        if size > 1 and not dist.is_initialized():
            raise EngineError(
                f"the {size} ranks are threads of one process, which cannot read or write a checkpoint together; start "
                "them as processes, with torchrun."
            )
        try:
            if size > 1:
                self._group = self._owned.open(range(size), backend="gloo", timeout=timedelta(seconds=seconds))
        except RuntimeError as error:
            self.close()
            raise EngineError(
                f"rank {rank} could not reach all ranks within {seconds:g} s to {purpose}: one of "
                f"them has ended or hangs ({first_line(error)}); look for the first traceback of the job."
            ) from error

    def send(self, data: memoryview, to: int) -> Wait:
        """Starts to send ``data`` to rank ``to`` with gloo; returns a function that waits."""
        return self._begin(data, to, lambda part: dist.isend(part, to, self._group))

    def receive(self, target: memoryview, source: int) -> Wait:
        """Starts to receive ``len(target)`` bytes from rank ``source`` into ``target``.

        Returns a function that waits.
        """
        return self._begin(target, source, lambda part: dist.irecv(part, source, self._group))

    def close(self) -> None:
        """Destroys the group on this rank. A second call does nothing."""
        self._closed, self._group = True, None
        self._owned.close()

    def _begin(self, data: memoryview, other: int, call: Callable[[torch.Tensor], dist.Work | None]) -> Wait:
        if self._closed:
            raise EngineError(
                "a checkpoint was read or written after close(), which ends this engine; initialize a new one."
            )
        parts = [data[start : start + MESSAGE_LIMIT] for start in range(0, len(data), MESSAGE_LIMIT)]
        try:
            works = [call(torch.frombuffer(part, dtype=torch.uint8)) for part in parts]
        except RuntimeError as error:
            raise self._lost(other, error) from error

        def finish() -> None:
            try:
                for work in works:
                    if work is not None:
                        work.wait()
            except RuntimeError as error:
                raise self._lost(other, error) from error

        return finish

    def _lost(self, other: int, error: RuntimeError) -> EngineError:
        self.broken = True
        return EngineError(
            f"rank {self.rank} has lost rank {other}, which has ended or hangs ({first_line(error)}); look for the "
            "first traceback of the job."
        )


class BroadcastGroup:
    """Group that broadcasts tensors from this process to another program, such as an inference engine.

    The other processes join as ranks 1 and up of a torch process group called ``name``.

    Args:
        host: address of this host; the others connect to it at port ``self.port``.
        size: number of processes, including this one.
        name: name of the group.
        device: device of this rank: the group uses gloo for the CPU and NCCL otherwise.
    """

    def __init__(self, host: str, size: int, name: str, device: torch.device) -> None:
        self._store: Store = TCPStore(host, 0, size, is_master=True, wait_for_workers=False)
        self.port, self._size, self._name, self._device = self._store.port, size, name, device
        self._group: Any = None

    def join(self, seconds: float) -> None:
        """Waits at most ``seconds`` until all processes of the group have joined it.

        Raises:
            EngineError: a process has not joined in time.
        """
        limit, on_host, store = timedelta(seconds=seconds), is_host(self._device), self._store
        for prefix in (self._name, f"{self._name}/", f"{self._device.type}/"):
            store = PrefixStore(prefix, store)
        with self._lost(seconds):
            if on_host:
                self._group = dist.ProcessGroupGloo(store, 0, self._size, limit)
            else:
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = limit
                self._group = dist.ProcessGroupNCCL(store, 0, self._size, options)

    def broadcast(self, tensor: torch.Tensor, seconds: float) -> None:
        """Sends ``tensor`` to all other processes of the group; waits at most ``seconds`` for them.

        Raises:
            EngineError: a process has not received it in time.
        """
        options = dist.BroadcastOptions()
        options.rootRank, options.timeout = 0, timedelta(seconds=seconds)
        sent = tensor.to(self._device)
        with self._lost(seconds):
            self._group.broadcast([sent.contiguous()], options).wait()  # it ends itself; a process must not exit before

    @contextmanager
    def _lost(self, seconds: float) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise EngineError(
                f"one of the {self._size} processes of the group {self._name!r} has failed, or did not answer within "
                f"{seconds:.1f} s ({first_line(error)}); look for the first error in the output of the processes that "
                "receive the weights."
            ) from error


@contextmanager
def noting(lost: list[EngineError]) -> Iterator[None]:
    """Runs the block; an EngineError in it is appended to ``lost`` instead of raised."""
    try:
        yield
    except EngineError as error:
        lost.append(error)


def collect(host: HostGroup, data: bytes) -> list[bytes] | None:
    """Gathers ``data`` of every rank on rank 0, in order of rank; returns None on other ranks.

    Raises:
        EngineError: a rank is lost; the message names it. Rank 0 raises only after it has tried to receive from all.
    """
    if host.rank:
        _send_text(host, data, 0)
        return None
    texts, lost = [data], None
    for source in range(1, host.size):
        try:
            texts.append(_receive_text(host, source))
        except EngineError as error:
            lost = lost or error  # keep receiving: the other ranks block until their message is taken
    if lost is not None:
        raise lost
    return texts


def announce(host: HostGroup, data: bytes) -> bytes:
    """Broadcasts ``data`` of rank 0 to every rank and returns it.

    Raises:
        EngineError: a rank is lost; the message names it. Rank 0 raises only after it has tried to send to all.
    """
    if host.rank:
        return _receive_text(host, 0)
    lost: EngineError | None = None
    for other in range(1, host.size):
        try:
            _send_text(host, data, other)
        except EngineError as error:
            lost = error
    if lost is not None:
        raise lost
    return data


def _send_text(host: HostGroup, data: bytes, to: int) -> None:
    waits = [host.send(memoryview(bytearray(len(data).to_bytes(8, "little"))), to)]
    if data:
        waits.append(host.send(memoryview(bytearray(data)), to))
    for wait in waits:
        wait()


def _receive_text(host: HostGroup, source: int) -> bytes:
    length = bytearray(8)
    host.receive(memoryview(length), source)()
    data = bytearray(int.from_bytes(length, "little"))
    if data:
        host.receive(memoryview(data), source)()
    return bytes(data)
