"""Signals between ranks in memory that all ranks can write: a growing number, the *epoch* of a call.

    writer        data .. data | signal(epoch)         the release orders the data before the signal
    reader        arrived(epoch) | data .. data        the acquire orders the data after the signal

Without assembly: an exchange with release semantics, and an addition of 0 with acquire semantics, both of system scope,
work between GPUs and between processes of the interpreter. The addition compiles to a load with acquire semantics.
Every wait is bounded, because a rank may hang; the first missing signal is recorded.

Waits for a rank that has ended stop: the host writes a word when it notices the end, and waits poll this word at
intervals. The host notices after all signals of that rank, so one more poll of the signal is conclusive.

A kernel is compiled once for all ranks and calls, without specialisation for the values of ``rank`` and ``epoch``:
other ranks wait while a rank compiles, and ranks on one GPU cannot load a kernel while another rank waits for them.
"""

import triton
import triton.language as tl

LOOKS_BETWEEN: tl.constexpr = tl.constexpr(64)
"""Polls of a signal per poll of the word, in host memory, that marks the writer as ended."""


@triton.jit
def signal(place, epoch):
    """Writes the call number ``epoch`` to the int32 at ``place``, after all earlier stores of this program."""
    tl.debug_barrier()  # the stores of every thread come before the release of one
    tl.atomic_xchg(place, epoch, sem="release", scope="sys")


@triton.jit
def arrived(place, ended, epoch, last, patience):
    """Polls the int32 at ``place``, a call number that the other rank writes, until it is at least ``epoch``. Returns
    True if the number is then at most ``last``.

    Returns False if the number is above ``last``, or if it is still below ``epoch`` after ``patience`` polls or after
    the other rank has ended and set its flag at ``ended``.
    """
    value = tl.atomic_add(place, 0, sem="acquire", scope="sys")
    looks = 0
    while (value < epoch) & (looks < patience):
        if looks % LOOKS_BETWEEN == LOOKS_BETWEEN - 1:
            gone = tl.atomic_add(ended, 0, sem="acquire", scope="sys")
            if gone != 0:
                looks = patience - 1  # the next look is the last
        value = tl.atomic_add(place, 0, sem="acquire", scope="sys")
        looks += 1
    tl.debug_barrier()
    return (value >= epoch) & (value <= last)


@triton.jit
def write_down(status, rank, tile, epoch):
    """Records a missing signal in the int64 at ``status``, as epoch << 32 | rank << 24 | tile + 1.

    If an earlier missing signal is recorded there, ``status`` does not change.
    """
    what = (tl.cast(epoch, tl.int64) << 32) | (tl.cast(rank, tl.int64) << 24) | (tl.cast(tile, tl.int64) + 1)
    tl.atomic_cas(status, tl.cast(0, tl.int64), what)


@triton.jit
def slot_of(table, owner, writer, epoch, capacity, RANKS: tl.constexpr, like):
    """Returns a pointer to the memory on rank ``owner`` for data of rank ``writer`` in call number ``epoch``.

    ``table`` has the memory address of each rank; ``capacity``: bytes per writer. ``like``: pointer of the result's
    type.
    """
    start = tl.load(table + owner) + tl.cast((epoch % 2) * RANKS + writer, tl.int64) * capacity
    return tl.multiple_of(start.to(like.dtype), 16)  # a pointer out of a table says nothing of its alignment


@triton.jit
def place_of(table, owner, index):
    """Returns a pointer to the int32 of signal ``index`` in the memory of rank ``owner``.

    ``table`` has the address of each rank's signals.
    """
    return tl.load(table + owner).to(tl.pointer_type(tl.int32)) + index


@triton.jit
def arrival_of(arrivals, owner, writer, tile, epoch, most, RANKS: tl.constexpr):
    """Returns a pointer to a signal in rank ``owner``'s memory: rank ``writer`` sets it for ``tile`` in call ``epoch``.

    ``arrivals`` has the address of each rank's signals; ``most`` is the number of signals per writer.
    """
    return place_of(arrivals, owner, ((epoch % 2) * RANKS + writer) * most + tile)


@triton.jit
def came(arrivals, status, rank, writer, tile, epoch, patience, most, RANKS: tl.constexpr):
    """Waits until rank ``writer`` signals to ``rank`` that it has written ``tile``; returns True if the signal arrives.

    After ``patience`` polls, or if the writer has ended, it records the missing signal in ``status`` and returns False.
    It does not wait if ``status`` already has a missing signal.
    """
    looks = tl.where(tl.load(status, volatile=True) == 0, patience, 0)
    ended = place_of(arrivals, RANKS, writer)
    there = arrived(arrival_of(arrivals, rank, writer, tile, epoch, most, RANKS), ended, epoch, epoch, looks)
    if not there:
        write_down(status, writer, tile, epoch)
    return there
