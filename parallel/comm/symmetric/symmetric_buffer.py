"""Memory that all ranks of an axis can write, for kernels that communicate (``kernels/gpu/overlap``).

    of each rank      slots of two epochs │ arrivals     the layout of :class:`Mailbox`
    of this one       who has ended                      memory of the host, see :class:`PeerWatch`

The memory comes from the backend: shared memory between processes of one host on CPUs, symmetric memory of torch
between GPUs that reach each other. Where there is none, collectives do the same work. Ranks can also be parts of one
process that share a device (:func:`virtual_ranks`): one GPU runs the whole protocol, each rank on a stream of its own,
with all programs of all ranks at once; on a CPU the ranks take turns.

An *epoch* is one call. It is counted on every rank, and all ranks make the same calls in one order, as they do with
collectives; there is nothing else that a call has to agree on.
"""

import logging
from collections.abc import Sequence
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from engine.kernels.device import SideStream, host_words
from engine.kernels.mailbox import Mailbox, read_status
from engine.parallel.comm.symmetric.peer_watch import PeerEndedError, PeerWatch
from engine.parallel.comm.symmetric.shared_bytes import SharedBytes, SlotSizes, padded_bytes, virtual_bytes

logger = logging.getLogger("trine")


class SymmetricBuffer:
    """One rank's end. All ranks of the axis make the same calls.

    Args:
        seconds: how long a kernel waits for a signal of a rank that has not ended.
        peers: the ranks of the axis, by index.
    """

    def __init__(self, memory: SharedBytes, sizes: SlotSizes, seconds: float, peers: Sequence[int]) -> None:
        self._memory, self._peers = memory, peers
        self.sizes = sizes
        """How much fits."""
        self._epoch = 0
        self._said: set[str] = set()
        self._brought: Tensor | None = None
        """A copy of the status word on the host, for the next check."""
        device = memory.own.device
        slots = torch.tensor(memory.addresses, dtype=torch.int64)
        self._ended = host_words(sizes.ranks, device)
        arrivals = torch.cat([slots + sizes.slots, torch.tensor([self._ended.data_ptr()])])
        self._watch = PeerWatch(memory.links, self._ended) if memory.links else None
        self.mailbox = Mailbox(
            rank=memory.index,
            slots=slots.to(device),
            arrivals=arrivals.to(device),
            status=torch.zeros(1, dtype=torch.int64, device=device),
            capacity=padded_bytes(sizes.capacity),
            most=sizes.most,
            patience=min(int(seconds * memory.looks_a_second), 2**31 - 1),
            multicast=memory.multicast,
        )

    @cached_property
    def copies(self) -> SideStream:
        """Where copies to other ranks go while this rank computes. Virtual ranks are given one each: a device has few
        streams, and one that two ranks share would let one wait behind the other."""
        return SideStream(self._memory.own.device)

    def fits(self, size: int, tiles: int) -> bool:
        """Whether a rank can send ``size`` bytes in ``tiles`` tiles to another in one call."""
        return size <= self.sizes.capacity and tiles <= self.sizes.most

    def say_once(self, sentence: str) -> None:
        """Tell in the log what is not sent this way, the first time."""
        if sentence not in self._said:
            self._said.add(sentence)
            logger.info("overlap: %s", sentence)

    def next_epoch(self) -> int:
        """Begin a call; its number."""
        self._epoch += 1
        return self._epoch

    def slot(self, epoch: int, writer: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """What ``writer`` has left with this rank, a view; valid until this rank's next call but one."""
        return self._slot(self.mailbox.rank, writer, epoch, shape, dtype)

    def slot_at(self, owner: int, epoch: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Where this rank writes what it leaves with ``owner``, a view."""
        return self._slot(owner, self.mailbox.rank, epoch, shape, dtype)

    def arrivals_at(self, owner: int, epoch: int) -> Tensor:
        """Where this rank signals tiles to ``owner``: int32 [most], a view."""
        most = self.sizes.most
        words = self._memory.parts[owner][self.sizes.slots :].view(torch.int32)
        return words[self._turn(epoch, self.mailbox.rank) * most :][:most]

    def _slot(self, owner: int, writer: int, epoch: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        start = self._turn(epoch, writer) * padded_bytes(self.sizes.capacity)
        return self._memory.parts[owner][start : start + prod(shape) * dtype.itemsize].view(dtype).view(shape)

    def _turn(self, epoch: int, writer: int) -> int:
        return (epoch % 2) * self.sizes.ranks + writer

    def bring_status(self) -> None:
        """Start a copy of the status word to the host, which the next ``check`` reads.

        The caller waits for the device before that check, so that the check itself waits for nothing launched since.
        """
        self._brought = self.mailbox.status.to("cpu", non_blocking=True, copy=True)

    def check(self) -> None:
        """Fail if a signal did not come. Waits for the kernel on a GPU, unless the status word was brought.

        Raises:
            PeerEndedError: the rank that had to send it has ended; it names the rank, the tile and the call.
            RuntimeError: it has not come in time, likewise.
        """
        word, self._brought = self._brought, None
        missing = read_status(int((self.mailbox.status if word is None else word).item()))
        if missing is None:
            return
        what = f"tile {missing.tile} of tensor rank {missing.rank} in call {missing.epoch}"
        ended = self._ended.tolist()
        if ended[missing.rank]:
            # whoever notices that a rank has ended ends too, and may be the one that this rank waits for
            first = min((turn, index) for index, turn in enumerate(ended) if turn)[1]
            before = "" if first == missing.rank else f", and rank {self._peers[first]} before it"
            peer = self._peers[missing.rank]
            raise PeerEndedError(f"rank {peer} has ended or closed its engine before {what} came{before}")
        raise RuntimeError(f"{what} has not come in time")

    def close(self) -> None:
        """Release the memory. A second call does nothing."""
        if self._watch is not None:
            self._watch.close()
        self._memory.close()


def virtual_ranks(sizes: SlotSizes, seconds: float, device: torch.device) -> tuple[SymmetricBuffer, ...]:
    """The ends of ranks that are parts of this process and share ``device``."""
    memories = virtual_bytes(sizes.ranks, sizes.total, device)
    return tuple(SymmetricBuffer(memory, sizes, seconds, range(sizes.ranks)) for memory in memories)
