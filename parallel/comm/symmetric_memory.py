"""Memory that all ranks of an axis can write, for kernels that communicate (``kernels/gpu/overlap``).

    of each rank      slots of two epochs │ arrivals     the layout of :class:`Mailbox`
    of this one       who has ended                      memory of the host, see :class:`PeerWatch`

The backend allocates it: shared memory of one host on CPUs, torch's symmetric memory between GPUs with peer access.
Without it, collectives do the same work.

An *epoch* is the number of a call, counted on every rank: all ranks make the same calls in the same order.

A thread, woken by the operating system, notices ranks that end, and writes a word that kernels poll:

    a rank ends, however    the system closes its sockets, and informs all who have a descriptor of its process
    every other rank        poll returns at once, the thread writes ended[index] = 1, of the next one that ends 2, ..
    a kernel that waits     looks at the word every so often, and gives up

The process descriptor covers a rank with running children, such as data loaders, which keep its sockets open; the
socket covers a rank that closes its engine and continues, and processes hidden from each other. Ranks of other hosts
are detected by timeouts only.
"""

import logging
import os
import select
import socket
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Final

import torch
from torch import Tensor

from engine.kernels.device import SideStream, host_words, is_host
from engine.kernels.overlap import Mailbox, read_status

logger = logging.getLogger("trine")


class PeerEndedError(RuntimeError):
    """Error of a wait for a rank that has ended or closed its engine."""


class PeerWatch:
    """Thread that detects, until ``close``, that other ranks of an axis have ended.

    Args:
        links: file descriptor of a socket to each watched rank, by its index on the axis.
        ended: int32 zeros [ranks of the axis] in host memory. The thread writes 1 at the index of the rank that ends
            first, 2 at the index of the second, and so on.
    """

    def __init__(self, links: Mapping[int, int], ended: Tensor) -> None:
        self._ended, self._indices = ended, {link: index for index, link in links.items()}
        self._processes = {process: index for index, link in links.items() for process in _process_of(link)}
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="trine-peers", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread; call it before the sockets to the watched ranks close. A second call does nothing."""
        if self._thread.is_alive():
            os.eventfd_write(self._wake, 1)
            self._thread.join()
            for descriptor in (self._wake, *self._processes):
                os.close(descriptor)

    def _run(self) -> None:
        poll, indices, count = select.poll(), self._indices | self._processes, 0
        for descriptor in (self._wake, *indices):
            poll.register(descriptor, select.POLLIN | select.POLLRDHUP)
        while True:
            for descriptor, _ in poll.poll():
                if descriptor == self._wake:
                    return
                poll.unregister(descriptor)
                if self._ended[indices[descriptor]] == 0:
                    count += 1
                    self._ended[indices[descriptor]] = count


def _process_of(link: int) -> list[int]:
    """A descriptor of the process at the other end, or none where it is not visible from here."""
    with suppress(OSError), socket.socket(fileno=os.dup(link)) as other:
        process, _, _ = struct.unpack("3i", other.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        return [os.pidfd_open(process)] if process > 0 else []
    return []


_LOOKS_A_SECOND: Final = (1e4, 1e6)
"""Approximate polls a second: interpreted kernel on host memory, GPU kernel on the memory of a peer."""
_WORD: Final = 4
_ALIGNED: Final = 256
"""Bytes; parts of the memory begin at multiples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedBytes:
    """Zeroed memory of equal size on every rank of an axis, writable by all of them."""

    parts: tuple[Tensor, ...]
    """Each rank's memory as uint8 [n], mapped by this rank."""
    index: int
    """Index of this rank on the axis."""
    close: Callable[[], None]
    """Releases the memory; a second call does nothing."""
    multicast: int = 0
    """Multicast address of all ranks' memories (NVLink SHARP); 0: unsupported."""
    links: Mapping[int, int] = field(default_factory=dict)
    """File descriptor, by index of another rank, of a socket that the system closes when that rank ends; ranks without
    a descriptor are not watched.
    """

    @property
    def own(self) -> Tensor:
        """This rank's own part of the memory, uint8 [n]."""
        return self.parts[self.index]

    @property
    def addresses(self) -> tuple[int, ...]:
        """Address of each rank's memory in the address space of this process, by index on the axis."""
        return tuple(part.data_ptr() for part in self.parts)

    @property
    def looks_a_second(self) -> float:
        """Approximate number of times per second that a waiting kernel polls a signal."""
        return _LOOKS_A_SECOND[not is_host(self.own.device)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotSizes:
    """Sizes of the slots of a symmetric buffer.

    A slot is memory for the data that one rank sends to another rank in one call.
    """

    ranks: int
    capacity: int
    """Size of one slot in bytes."""
    most: int
    """Maximum number of tiles of one slot."""

    @property
    def slots(self) -> int:
        """Bytes of all slots (receive buffers) in one rank's memory, enough for two successive calls."""
        return 2 * self.ranks * padded_bytes(self.capacity)

    @property
    def total(self) -> int:
        """Bytes of one rank's memory: the sum of :attr:`slots` and :attr:`arrivals`."""
        return self.slots + self.arrivals

    @property
    def arrivals(self) -> int:
        """Bytes of the signals in one rank's memory: an int32 word for each tile of each slot.

        A tile is a part of a slot.
        """
        return padded_bytes(2 * _WORD * self.ranks * self.most)


def padded_bytes(size: int) -> int:
    """Rounds ``size`` up to a multiple of the alignment, 256 bytes."""
    return -(-size // _ALIGNED) * _ALIGNED


class SymmetricBuffer:
    """Memory on all ranks of an axis, writable by kernels of all ranks, for collectives inside kernels.

    All ranks run the same collectives in the same order.

    Args:
        memory: memory of all ranks, mapped by this process.
        sizes: bytes and tiles that one rank can send to another in one collective.
        seconds: timeout of a kernel's wait for a signal.
        peers: global ranks of the axis, by index.
    """

    def __init__(self, memory: SharedBytes, sizes: SlotSizes, seconds: float, peers: Sequence[int]) -> None:
        self._memory, self._peers = memory, peers
        self.sizes = sizes
        """Bytes that fit."""
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
        """This rank's own stream for copies to other ranks, which overlap with computation."""
        return SideStream(self._memory.own.device)

    def fits(self, size: int, tiles: int) -> bool:
        """Returns True if a rank can send ``size`` bytes, divided into ``tiles`` tiles, to another rank in one call."""
        return size <= self.sizes.capacity and tiles <= self.sizes.most

    def say_once(self, sentence: str) -> None:
        """Logs ``sentence``, the reason why a collective does not use this memory, unless it has logged it before."""
        if sentence not in self._said:
            self._said.add(sentence)
            logger.info("overlap: %s", sentence)

    def next_epoch(self) -> int:
        """Starts the next call on this memory and returns its number, the epoch, from 1."""
        self._epoch += 1
        return self._epoch

    def slot(self, epoch: int, writer: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Returns a view, with this ``shape`` and ``dtype``, of the data that this rank receives from ``writer``.

        ``writer``: index of a rank on the axis. ``epoch``: number of the collective. The view is valid until ``writer``
        starts the collective ``epoch`` + 2.
        """
        return self._slot(self.mailbox.rank, writer, epoch, shape, dtype)

    def slot_at(self, owner: int, epoch: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Returns a view, with ``shape`` and ``dtype``, of the part of rank ``owner``'s memory into which this rank
        writes.

        ``owner``: index on the axis. ``epoch``: number of the collective.
        """
        return self._slot(owner, self.mailbox.rank, epoch, shape, dtype)

    def arrivals_at(self, owner: int, epoch: int) -> Tensor:
        """Returns a view of int32 words in the memory of rank ``owner``, one for each tile that a slot can have.

        This rank writes ``epoch``, the number of the collective, to word i when tile i of its data has arrived.
        ``owner``: index on the axis.
        """
        most = self.sizes.most
        words = self._memory.parts[owner][self.sizes.slots :].view(torch.int32)
        return words[self._turn(epoch, self.mailbox.rank) * most :][:most]

    def _slot(self, owner: int, writer: int, epoch: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        start = self._turn(epoch, writer) * padded_bytes(self.sizes.capacity)
        return self._memory.parts[owner][start : start + prod(shape) * dtype.itemsize].view(dtype).view(shape)

    def _turn(self, epoch: int, writer: int) -> int:
        return (epoch % 2) * self.sizes.ranks + writer

    def bring_status(self) -> None:
        """Starts to copy the kernels' timeout report to the host, for the next ``check``.

        The caller must wait for the device before that ``check``.
        """
        self._brought = self.mailbox.status.to("cpu", non_blocking=True, copy=True)

    def check(self) -> None:
        """Raises if a kernel has timed out. Synchronizes the GPU, unless ``bring_status`` was called for this check.

        Raises:
            PeerEndedError: the awaited rank has ended; the message names the rank, the tile of its data and the call.
            RuntimeError: a signal has timed out; the message names the rank, the tile of its data and the call.
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
        """Releases the memory. A second call does nothing."""
        if self._watch is not None:
            self._watch.close()
        self._memory.close()
