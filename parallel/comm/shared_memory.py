"""Collectives between ranks of one host through shared memory, in place of gloo's messages.

    rank 0   write slot 0 │           │ read the slots ─ write slot 0' │ ..
    rank 1   write slot 1 │  barrier  │ read the slots ─ write slot 1' │ ..
                          └ start .. wait ┘

Every rank has two slots and writes them alternately. A slot is written again two barriers later, and a rank arrives at
the next barrier only after it has read all slots, so one barrier per piece is enough. A tensor larger than a slot is
moved in pieces.

Every rank computes the sum of all slots, which takes less time than another barrier; large sums of four or more ranks
are computed in parts, one by each rank, and read after a second barrier. Both add in the same order, adjacent pairs
first, so all ranks get equal bits. Half precision is added in fp32 and rounded once.

Shape suffixes: R ranks, s elements of a shard, n elements of a piece.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from itertools import islice

import torch
from torch import Tensor

from engine.parallel.comm.backend import Reduction, Wait
from engine.parallel.comm.host_barrier import HostBarrier

SLOT_BYTES = 1 << 19
"""Size of a slot. Smaller slots need more barriers; larger ones exceed the processor's cache and cost memory."""
MESSAGE_BYTES = 1 << 12
"""Bytes of a message that ranks exchange at a time."""
_MANY_RANKS = 4
_IN_PARTS = 1 << 19
"""With at least ``_MANY_RANKS`` ranks, bytes of a piece from which a sum in parts costs less."""

_MOST_VIEWS = 256
"""Views of slots that are cached, because making them costs as much as a small sum."""

_Steps = Iterator[None]
"""A collective in two halves: it yields once, after this rank has written everything that the others wait for."""


def shared_bytes(ranks: int) -> int:
    """Returns the bytes of host memory that a :class:`SharedMemory` of ``ranks`` ranks needs."""
    return 2 * ranks * SLOT_BYTES


class SharedMemory:
    """Collectives over one axis through shared memory of a host, for CPU tensors of any size and dtype.

    A collective is completed by its wait, or by the next call if that is earlier.

    All methods raise RuntimeError if a rank has ended or is late; every later call then fails on all ranks.
    """

    def __init__(self, barrier: HostBarrier) -> None:
        self.ranks = barrier.size
        self._index = barrier.index
        self._host_barrier = barrier
        self._slots: dict[tuple[int, torch.dtype, int], list[Tensor]] = {}
        self._turn = 0
        self._under_way: _Steps = iter(())
        self._failure = ""

    def all_reduce(self, tensor: Tensor, op: Reduction = "sum") -> Wait:
        """Starts to sum ``tensor`` in place over the axis; returns a function that waits.

        ``op`` "max" takes the elementwise maximum instead; a NaN on any rank gives NaN.
        """
        return self._start(self._all_reduce(tensor.data, op))

    def reduce_scatter(self, shard: Tensor, full: Tensor) -> Wait:
        """Starts to sum ``full`` [ranks * s] over the axis into this rank's slice ``shard`` [s].

        Returns a function that waits. ``shard`` may share memory with ``full``.
        """
        return self._start(self._reduce_scatter(shard.data, full.data.view(self.ranks, -1)))

    def all_gather(self, full: Tensor, shard: Tensor) -> Wait:
        """Starts to copy every rank's ``shard`` [s] into ``full`` [ranks * s], in order of index.

        Returns a function that waits.
        """
        return self._start(self._all_gather(full.data.view(self.ranks, -1), shard.data))

    def close(self) -> None:
        """Releases the shared memory; later calls fail on all ranks. A second call does nothing."""
        self._under_way = iter(())
        self._give_up("it is closed")

    def _start(self, steps: _Steps) -> Wait:
        self._finish(self._under_way)
        self._under_way = steps
        self._finish(islice(steps, 1))
        return partial(self._finish, steps)

    def _finish(self, steps: _Steps) -> None:
        """Run the remaining ``steps``. An interruption, Ctrl-C too, ends the axis, since its ranks are then apart."""
        if self._failure:
            raise RuntimeError(self._failure)
        try:
            for _ in steps:
                pass
        except BaseException as error:
            self._give_up(str(error) or type(error).__name__)
            raise

    def _give_up(self, failure: str) -> None:
        self._failure = failure
        self._slots.clear()
        self._host_barrier.close()

    def _next_slots(self, dtype: torch.dtype, elements: int) -> list[Tensor]:
        """The first ``elements`` of every rank's slot for the next piece, by rank."""
        self._turn ^= 1
        key = (self._turn, dtype, elements)
        found = self._slots.get(key)
        if found is None:
            if len(self._slots) == _MOST_VIEWS:
                self._slots.clear()
            table = torch.frombuffer(self._host_barrier.memory, dtype=dtype).view(2, self.ranks, -1)
            found = self._slots[key] = [slot[:elements] for slot in table[self._turn]]
        return found

    def _pieces(self, whole: Tensor, slot_bytes: int) -> Iterator[slice]:
        """Slices of ``whole`` [..] that fit a slot each."""
        size, elements = max(1, slot_bytes // whole.itemsize), whole.numel()
        return (slice(start, min(start + size, elements)) for start in range(0, elements, size))

    def _all_reduce(self, tensor: Tensor, op: Reduction) -> _Steps:
        flat = tensor.reshape(-1)  # shares memory with a contiguous tensor; otherwise copied back below
        for piece in self._pieces(flat, SLOT_BYTES):
            piece_n = flat[piece]
            in_parts = self.ranks >= _MANY_RANKS and piece_n.nbytes >= _IN_PARTS
            yield from (self._reduce_in_parts if in_parts else self._reduce_whole)(piece_n, op)
        if not tensor.is_contiguous():
            tensor.copy_(flat.view(tensor.shape))

    def _exchange(self, own: Tensor) -> Generator[None, None, list[Tensor]]:
        """Every rank's ``own``, flat, by rank; valid until the second barrier from here."""
        slots = self._next_slots(own.dtype, own.numel())
        mine = slots[self._index]
        (mine if own.dim() == 1 else mine.view(own.shape)).copy_(own)
        yield from self._barrier()
        return slots

    def _barrier(self) -> _Steps:
        self._host_barrier.arrive()
        yield
        self._host_barrier.meet()

    def _reduce_whole(self, piece_n: Tensor, op: Reduction) -> _Steps:
        slots = yield from self._exchange(piece_n)
        _combine(slots, piece_n, op)

    def _reduce_in_parts(self, piece_n: Tensor, op: Reduction) -> _Steps:
        """Reduce one part into this rank's slot for the next barrier, and copy the parts of the other ranks."""
        size, ranks = piece_n.numel(), self.ranks
        parts = [slice(size * rank // ranks, size * (rank + 1) // ranks) for rank in range(ranks)]
        own = parts[self._index]
        given = yield from self._exchange(piece_n)
        reduced = self._next_slots(piece_n.dtype, size)
        _combine([slot[own] for slot in given], reduced[self._index][own], op)
        yield from self._barrier()
        for slot, part in zip(reduced, parts, strict=True):
            piece_n[part].copy_(slot[part])

    def _reduce_scatter(self, shard_s: Tensor, full_Rs: Tensor) -> _Steps:
        for piece in self._pieces(shard_s, SLOT_BYTES // self.ranks):
            given_Rn = full_Rs[:, piece]
            slots = yield from self._exchange(given_Rn)
            _combine([slot.view(given_Rn.shape)[self._index] for slot in slots], shard_s[piece], "sum")

    def _all_gather(self, full_Rs: Tensor, shard_s: Tensor) -> _Steps:
        for piece in self._pieces(shard_s, SLOT_BYTES):
            slots = yield from self._exchange(shard_s[piece])
            for row_s, slot in zip(full_Rs, slots, strict=True):
                row_s[piece].copy_(slot)


class HostMessages:
    """All-gather of small byte messages through shared memory, among ranks of one host.

    All methods raise RuntimeError if a rank has ended or is late; every later call then fails too.
    """

    def __init__(self, barrier: HostBarrier) -> None:
        self._barrier, self._turn, self._failure = barrier, 0, ""

    def exchange(self, data: bytes) -> list[bytes]:
        """All-gathers ``data``, of equal length on all ranks; returns the messages of all ranks in order of index."""
        if self._failure:
            raise RuntimeError(self._failure)
        try:
            pieces = [self._piece(data[start : start + MESSAGE_BYTES]) for start in range(0, len(data), MESSAGE_BYTES)]
        except BaseException as error:
            self._failure = str(error) or type(error).__name__
            self.close()
            raise
        return [b"".join(parts) for parts in zip(*pieces, strict=True)] or [b""] * self._barrier.size

    def _piece(self, own: bytes) -> list[bytes]:
        self._turn ^= 1  # a rank that is ahead by one piece writes into the other half
        memory, first = self._barrier.memory, self._turn * self._barrier.size * MESSAGE_BYTES
        starts = [first + index * MESSAGE_BYTES for index in range(self._barrier.size)]
        memory[starts[self._barrier.index] : starts[self._barrier.index] + len(own)] = own
        self._barrier.arrive()
        self._barrier.meet()
        return [memory[start : start + len(own)] for start in starts]

    def close(self) -> None:
        """Releases the shared memory; later calls fail on all ranks. A second call does nothing."""
        self._barrier.close()


def _combine(parts: Sequence[Tensor], out: Tensor, op: Reduction) -> None:
    """Reduce ``parts`` into ``out``, which shares no memory with them."""
    if op == "sum" and len(parts) > 2 and out.is_floating_point() and out.itemsize < 4:
        total = parts[0].float()
        for part in parts[1:]:
            total.add_(part)
        out.copy_(total)
    else:
        _in_pairs(torch.maximum if op == "max" else torch.add, parts, out)


def _in_pairs(reduce: Callable[..., Tensor], parts: Sequence[Tensor], out: Tensor) -> None:
    """(0 + 1) + (2 + 3) for four parts, (0 + 1) + 2 for three: rounding errors grow with the log of the number."""
    half = (len(parts) + 1) // 2
    left, right = parts[0], parts[half]
    if half > 1:
        _in_pairs(reduce, parts[:half], out)
        left = out
    if len(parts) - half > 1:
        right = torch.empty_like(out)
        _in_pairs(reduce, parts[half:], right)
    reduce(left, right, out=out)
