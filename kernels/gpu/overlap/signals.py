"""Signals between ranks in memory that all of them can write: a number that only grows, the *epoch* of a call.

    who writes    data .. data | signal(epoch)         the release orders the data before the signal
    who reads     arrived(epoch) | data .. data        the acquire orders the data after it

No assembly: an exchange with release semantics and an addition of nothing with acquire semantics, both of the scope of
the system, are what a GPU needs for its peers and what the interpreter runs between processes. The second becomes a
plain load that acquires. Every wait is bounded, since a rank may stand still; what did not come is written down once.

A rank that has ended is waited for no longer: the host, which notices, writes so into memory that waits look at now and
then. It can only know after everything that the rank has signalled, so one more look at the signal tells the rest.

A kernel is compiled once for all ranks and calls: it is not specialised for the values of ``rank`` and ``epoch``. While
a rank compiles, the others wait; and ranks on one GPU cannot load a kernel while another waits for them.
"""

import triton
import triton.language as tl

LOOKS_BETWEEN: tl.constexpr = tl.constexpr(64)
"""Looks at a signal for each look at whether its writer has ended, which is in the memory of the host."""


@triton.jit
def signal(place, epoch):
    """Writes ``epoch`` to the int32 at ``place`` after everything that this program has stored."""
    tl.debug_barrier()  # the stores of every thread come before the release of one
    tl.atomic_xchg(place, epoch, sem="release", scope="sys")


@triton.jit
def arrived(place, ended, epoch, last, patience):
    """Waits until the int32 at ``place`` is at least ``epoch``; False after ``patience`` looks, or as soon as the int32
    at ``ended`` is not 0, or if it is more than ``last``: then the ranks do not make the same calls."""
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
    """Leaves what did not come in ``status``, unless something is there: epoch << 32 | rank << 24 | tile + 1."""
    what = (tl.cast(epoch, tl.int64) << 32) | (tl.cast(rank, tl.int64) << 24) | (tl.cast(tile, tl.int64) + 1)
    tl.atomic_cas(status, tl.cast(0, tl.int64), what)


@triton.jit
def slot_of(table, owner, writer, epoch, capacity, RANKS: tl.constexpr, like):
    """Pointer to the elements that ``writer`` leaves with ``owner`` in ``epoch``, of the type of pointer ``like``."""
    start = tl.load(table + owner) + tl.cast((epoch % 2) * RANKS + writer, tl.int64) * capacity
    return tl.multiple_of(start.to(like.dtype), 16)  # a pointer out of a table says nothing of its alignment


@triton.jit
def place_of(table, owner, index):
    """Pointer to the ``index``-th signal of ``owner``."""
    return tl.load(table + owner).to(tl.pointer_type(tl.int32)) + index


@triton.jit
def arrival_of(arrivals, owner, writer, tile, epoch, most, RANKS: tl.constexpr):
    """Pointer to the signal that ``writer`` gives ``owner`` with a tile; they alternate as slots do."""
    return place_of(arrivals, owner, ((epoch % 2) * RANKS + writer) * most + tile)


@triton.jit
def came(arrivals, status, rank, writer, tile, epoch, patience, most, RANKS: tl.constexpr):
    """Waits until ``writer`` has left a tile with ``rank``; False, and written down, if it has not. Once something has
    not come, nothing else is waited for: a rank that hangs costs one wait, not one for each tile."""
    looks = tl.where(tl.load(status, volatile=True) == 0, patience, 0)
    ended = place_of(arrivals, RANKS, writer)
    there = arrived(arrival_of(arrivals, rank, writer, tile, epoch, most, RANKS), ended, epoch, epoch, looks)
    if not there:
        write_down(status, writer, tile, epoch)
    return there
