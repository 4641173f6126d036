"""Traffic between the hosts' memories, beside training: a group of its own, on gloo, for threads in the background.

Nothing here is counted as a step's traffic, nothing waits for a GPU, and a rank that dies breaks this group only.
Messages between two ranks keep their order; all of them are named after the rank that they wait for.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from engine.errors import EngineError, first_line
from engine.parallel.comm.world import OwnedGroups

MESSAGE_LIMIT = 1 << 28
"""Bytes of one message; longer ones go in several."""

Wait = Callable[[], None]


class HostGroup(Protocol):
    """Bytes between the ranks of a job."""

    rank: int
    size: int

    def send(self, data: memoryview, to: int) -> Wait:
        """Begin to send; ``data`` must not change before the wait."""

    def receive(self, target: memoryview, source: int) -> Wait:
        """Begin to fill ``target`` with as many bytes."""


class TorchHostGroup:
    """Between real processes. All ranks make it, at the same point.

    Args:
        seconds: after which a rank that does not answer is given up.

    Raises:
        EngineError: a rank did not come.
    """

    def __init__(self, rank: int, size: int, seconds: float) -> None:
        self.rank, self.size = rank, size
        self._owned, self._closed = OwnedGroups(), False
        self._group: dist.ProcessGroup | None = None
        try:
            if size > 1:
                self._group = self._owned.open(backend="gloo", timeout=timedelta(seconds=seconds))
        except RuntimeError as error:
            self.close()
            raise EngineError(
                f"rank {rank} could not meet all ranks within {seconds:g} s to read or write a checkpoint: one has "
                f"ended or hangs ({first_line(error)}); look for the first traceback of the job."
            ) from error

    def send(self, data: memoryview, to: int) -> Wait:
        """Begin to send."""
        return self._begin(data, to, lambda part: dist.isend(part, to, self._group))

    def receive(self, target: memoryview, source: int) -> Wait:
        """Begin to receive."""
        return self._begin(target, source, lambda part: dist.irecv(part, source, self._group))

    def close(self) -> None:
        """Destroy the group on this rank. A second call does nothing."""
        self._closed, self._group = True, None
        self._owned.close()

    def _begin(self, data: memoryview, other: int, call: Callable[[torch.Tensor], dist.Work | None]) -> Wait:
        if self._closed:
            raise EngineError(
                "a checkpoint was to be read or written after close(): the engine is over; make a new one."
            )
        parts = [data[start : start + MESSAGE_LIMIT] for start in range(0, len(data), MESSAGE_LIMIT)]
        try:
            works = [call(torch.frombuffer(part, dtype=torch.uint8)) for part in parts]
        except RuntimeError as error:
            raise _lost(self.rank, other, error) from error

        def finish() -> None:
            try:
                for work in works:
                    if work is not None:
                        work.wait()
            except RuntimeError as error:
                raise _lost(self.rank, other, error) from error

        return finish


def collect(host: HostGroup, data: bytes) -> list[bytes] | None:
    """Every rank's bytes, by rank, on rank 0; None elsewhere.

    Raises:
        EngineError: after all who can be reached have been heard, names the first rank that does not answer.
    """
    if host.rank:
        _send_text(host, data, 0)
        return None
    texts, lost = [data], None
    for source in range(1, host.size):
        try:
            texts.append(_receive_text(host, source))
        except EngineError as error:
            lost = lost or error  # the others wait until they are heard
    if lost is not None:
        raise lost
    return texts


def announce(host: HostGroup, data: bytes) -> bytes:
    """Rank 0's bytes, on every rank; what others give is not looked at.

    Raises:
        EngineError: after all who can be reached have been told, names one that cannot.
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


def _lost(rank: int, other: int, error: RuntimeError) -> EngineError:
    return EngineError(f"rank {rank} has lost rank {other}, which has ended or hangs ({first_line(error)}).")
