"""What a kernel that communicates knows of the other ranks: addresses of memory that all of them can write.

    of each rank   2 x W slots     what the ranks write to it, in turns of two epochs
                   2 x W x most    arrivals: the epoch in which a rank has written a tile, likewise
    of this rank   W ended         what the host writes down: that a rank has ended, so nobody waits for it

An *epoch* is the number of a call, from 1, counted by all ranks alike. Nothing is ever reset, so a signal that comes
late, or twice, is one of an old epoch and means nothing any more.

Nobody has to say that a slot was read. In every call each rank waits for something of every other one. So a rank that
writes in epoch e has ended e - 1, for which all others wrote after they had ended e - 2, whose tiles were in the slot.
For the same reason an arrival that is waited for in epoch e is below e or equal to it; more than e says that the ranks
do not make the same calls.
"""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Mailbox:
    """One rank's view of the memory of all ranks of an axis."""

    rank: int
    slots: Tensor
    """Address of the slots of each rank, int64 [W]."""
    arrivals: Tensor
    """Address of the arrivals of each rank, and last of the words of this rank about ranks that have ended, int32 [W]:
    int64 [W + 1]."""
    status: Tensor
    """What did not come, int64 [1], of this rank alone; 0: everything came."""
    capacity: int
    """Bytes of a slot."""
    most: int
    """Tiles of a call that a rank can signal."""
    patience: int
    """Looks at a signal until it counts as lost."""
    multicast: int = 0
    """Address of the slots of all ranks at once, through the switch between them; 0: there is no such."""

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.slots)


class Missing(NamedTuple):
    """The first signal that did not come."""

    rank: int
    tile: int
    epoch: int


def read_status(word: int) -> Missing | None:
    """What a status word says; None: everything came."""
    return Missing(word >> 24 & 0xFF, (word & 0xFFFFFF) - 1, word >> 32) if word else None
