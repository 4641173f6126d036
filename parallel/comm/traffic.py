"""Traffic: the bytes that a collective sends, and the tally of sent bytes.

The planner and the counter use the same rule, so that a plan can be compared exactly with a run. Bytes are those that
one rank sends in a ring (Patarasuk and Yuan 2009): a reduce-scatter or an all-gather of n bytes over N ranks sends
n(N-1)/N, an all-reduce is one of each. An all-to-all, in which a rank has n bytes for all of them, sends n(N-1)/N.
An exchange of rows sends the n bytes that a rank has for others. A message of n bytes to one other rank sends n;
receiving it counts 0.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, NamedTuple

from engine.parallel.grid import Axis

Op = Literal["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "exchange", "send", "receive"]


# How many times (N-1)/N of the payload leaves a rank.
_PASSES: Mapping[Op, int] = MappingProxyType({"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1, "all_to_all": 1})


def megabytes(count: int) -> str:
    """Formats a number of bytes as B, KiB, MiB or GiB."""
    if count < 100 * 2**10:
        return f"{count} B" if count < 10_000 else f"{count / 2**10:.1f} KiB"
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def sent_bytes(op: Op, payload_bytes: int, ranks: int = 2) -> int:
    """Returns the bytes that one rank sends in ``op``; collectives are counted as ring algorithms; a "receive" counts
    as 0.

    ``payload_bytes``: bytes of the message. For "exchange", bytes for all other ranks together; for a collective, bytes
    of its full tensor.
    """
    if op in ("send", "exchange"):
        return payload_bytes
    if op == "receive":
        return 0
    return _PASSES[op] * payload_bytes * (ranks - 1) // ranks


@dataclass(frozen=True, slots=True)
class Traffic:
    """Numbers of calls and of bytes sent by one rank over one axis under one label. Receives are not counted."""

    axis: Axis
    label: str
    calls: int
    bytes: int

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(self.axis, self.label, self.calls + other.calls, self.bytes + other.bytes)


class Record(NamedTuple):
    """Entry of the log of recent calls: a collective or message; ``sequence`` is its number, from 1."""

    sequence: int
    op: Op
    axis: Axis
    label: str
    elements: int
    dtype: str

    def __str__(self) -> str:
        return f"#{self.sequence} {self.op} '{self.label}' over {self.axis}, {self.elements} x {self.dtype}"


class Tally:
    """Totals of calls and sent bytes of one rank, by axis and label; a row is a :class:`Traffic`."""

    def __init__(self, entries: Iterable[Traffic] = ()) -> None:
        self._rows: dict[tuple[Axis, str], tuple[int, int]] = {}
        """Calls and bytes."""
        for entry in entries:
            self.add(entry)

    def add(self, entry: Traffic) -> None:
        """Adds the calls and bytes of ``entry`` to the totals of its axis and label."""
        self.count(entry.axis, entry.label, entry.calls, entry.bytes)

    def count(self, axis: Axis, label: str, calls: int, sent: int) -> None:
        """Adds ``calls`` calls and ``sent`` bytes to the totals of ``axis`` and ``label``."""
        before = self._rows.get((axis, label), (0, 0))
        self._rows[axis, label] = before[0] + calls, before[1] + sent

    def rows(self) -> tuple[Traffic, ...]:
        """Returns the totals, one entry for each axis and label, sorted by axis and label."""
        return tuple(Traffic(*key, *self._rows[key]) for key in sorted(self._rows))

    def bytes(self) -> int:
        """Returns the bytes sent by this rank, over all axes and labels."""
        return sum(sent for _, sent in self._rows.values())

    def times(self, count: int) -> "Tally":
        """Returns a new tally with all calls and bytes multiplied by ``count``."""
        return Tally(Traffic(row.axis, row.label, row.calls * count, row.bytes * count) for row in self.rows())

    def since(self, earlier: "Tally") -> "Tally":
        """Returns the traffic added to this tally since ``earlier``, a :meth:`copy` of this tally."""
        before = {(row.axis, row.label): row for row in earlier.rows()}
        return Tally(
            Traffic(row.axis, row.label, row.calls - old.calls, row.bytes - old.bytes) if old else row
            for row in self.rows()
            for old in [before.get((row.axis, row.label))]
            if old != row
        )

    def copy(self) -> "Tally":
        """Returns a copy; later additions to this tally do not change the copy."""
        return Tally(self.rows())
