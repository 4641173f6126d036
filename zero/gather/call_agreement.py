"""Agreement of data ranks on extra gathers, and on the module calls that a backward will reach (ZeRO 3).

A data rank cannot know that another rank calls a module once more (a vision tower for images and videos, a loop of
data-dependent length). So every forward ends with a round, an all-gather of messages, in which ranks report its end or
request extra buckets:

    rank 0   gathers 0 1 2 3 in order | needs 1: round      | needs 2: round      | end: round
    rank 1   gathers 0 1 2 3 in order | end: round, gathers 1 | round, gathers 2  | round

A rank starts its first round after all gathers in the common order. The last round compares the calls: after equal
calls, backwards make equal requests on all ranks; after unequal calls, a rank keeps the buckets that its backward will
reach again, and requests nothing.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from engine.parallel.comm.comm import Comm

_DIGEST_BYTES = 8
_ENDED, _EVERYWHERE = 1, 2


ROUND = "gather round"
"""Label of the rounds' collectives."""


def round_bytes(buckets: int) -> int:
    """Returns the bytes that a rank sends in one round of :class:`GatherRounds`: flags, a digest of module calls, and
    one bit for each of ``buckets`` buckets.
    """
    return 1 + _DIGEST_BYTES + _mask_bytes(buckets)


@dataclass(frozen=True, slots=True)
class Said:
    """Message in which a rank requests unplanned gathers of the buckets with the indices ``wanted``."""

    wanted: frozenset[int] = frozenset()
    everywhere: bool = False
    """True: the requested buckets stay gathered in every later pass."""
    ended: bool = False
    """True if this rank's forward has ended, so that it requests nothing."""
    calls: bytes = bytes(_DIGEST_BYTES)
    """Digest of the module calls of an ended forward."""


class GatherRounds:
    """Rounds of messages in which data ranks request parameter gathers beyond the common gather order (ZeRO 3). Each
    round is one all-gather in host memory, with the label "gather round".

    ``buckets``: number of buckets, the same on all ranks.
    """

    def __init__(self, comm: Comm, buckets: int) -> None:
        self._comm, self._bytes = comm, _mask_bytes(buckets)

    def meet(self, said: Said) -> list[Said]:
        """All-gathers the message ``said``, and returns the messages of all ranks, in order of rank. Collective."""
        mask = sum(1 << index for index in said.wanted).to_bytes(self._bytes, "little")
        flags = bytes([_ENDED * said.ended + _EVERYWHERE * said.everywhere])
        return [self._read(answer) for answer in self._comm.agree_on_gathers(flags + said.calls + mask, ROUND)]

    def _read(self, answer: bytes) -> Said:
        flags, calls, mask = answer[0], answer[1 : 1 + _DIGEST_BYTES], answer[1 + _DIGEST_BYTES :]
        wanted = frozenset(_bits(int.from_bytes(mask, "little")))
        return Said(wanted, bool(flags & _EVERYWHERE), bool(flags & _ENDED), calls)


def _mask_bytes(buckets: int) -> int:
    return (buckets + 7) // 8


def _bits(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


class PassCalls:
    """Record of the module calls in the forwards before one backward. The position of a call is the index of its
    module's gather group (modules gathered together) in forward order.
    """

    def __init__(self) -> None:
        self._positions: list[int] = []
        self._reached = False
        self.unequal = False
        """Data ranks have made different calls in one of the forwards."""

    def begin_forward(self) -> None:
        """Starts the record of a forward. Discards earlier calls if a backward has started since the last forward."""
        if self._reached:
            self._positions.clear()
            self._reached = self.unequal = False

    def begin_backward(self) -> None:
        """Records that a backward has started. The recorded calls remain until the next forward begins."""
        self._reached = True

    def note(self, position: int) -> None:
        """Records a call of a module at ``position`` in the gather order. Successive calls at the same position count
        as one.
        """
        if self._positions[-1:] != [position]:
            self._positions.append(position)

    def compare(self, last: Sequence[Said]) -> None:
        """Sets ``unequal`` to True if the digests of module calls differ in ``last``, the messages of all ranks. Never
        resets it.
        """
        self.unequal = self.unequal or len({said.calls for said in last}) > 1

    @property
    def digest(self) -> bytes:
        """Digest of the recorded calls, 8 bytes. Equal calls in equal order have equal digests."""
        return blake2b(repr(self._positions).encode(), digest_size=_DIGEST_BYTES).digest()

    @property
    def reached_again(self) -> frozenset[int]:
        """Positions in the gather order that break the descending order of a backward: it has already reached the same
        or a lower position. Parameters of these modules may have been freed by then.
        """
        again, lowest = set(), None
        for position in reversed(self._positions):
            if lowest is not None and position >= lowest:
                again.add(position)
            lowest = position if lowest is None else min(lowest, position)
        return frozenset(again)
