"""Limits of retained forwards: graphs of the second door wait for their backward, up to bytes and seconds.

finish    graphs and earlier weights take too many bytes on a rank: the oldest forward is dropped
tick      a forward has waited for too many seconds: it is dropped
submit    a backward of a dropped forward is refused with 410; one that was accepted earlier runs, and its forward stays

Drops are decided here and not on the ranks, so that a start from the journal repeats every accepted backward.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from engine.serving.bookkeeping.entry import EntryState, FutureEntry, RequestRefusedError
from engine.serving.commands import BackwardTensors, Command, DropTicket, Failure, ForwardTensors, Result, UnloadModel

_REFUSALS = 4096
"""Number of the newest drops that are remembered."""


@dataclass(eq=False, slots=True)
class _Waiting:
    """Retained forward on the ranks."""

    model: str
    since: float
    backward: FutureEntry | None = None
    """Its accepted backward."""
    is_dropped: bool = False

    @property
    def may_drop(self) -> bool:
        return not self.is_dropped and (self.backward is None or self.backward.state is EntryState.DONE)


class RetainedForwards:
    """List of the retained forwards of all models: autograd graphs that wait for a client's backward.

    Args:
        most_bytes: limit of bytes on one rank, for retained graphs and the earlier weights that these graphs use.
        seconds: longest time for which a forward is retained.
    """

    def __init__(self, most_bytes: float, seconds: float) -> None:
        self._most_bytes, self._seconds = most_bytes, seconds
        self._waiting: OrderedDict[str, _Waiting] = OrderedDict()
        self._refusals: OrderedDict[str, str] = OrderedDict()
        self.bytes = 0
        """Bytes on the rank with most of them, after the last command."""

    def __len__(self) -> int:
        """Returns the number of forwards that wait."""
        return len(self._waiting)

    def check(self, command: Command | None) -> None:
        """Refuses ``command`` if it is the backward of a dropped forward.

        Raises:
            RequestRefusedError: 410.
        """
        if isinstance(command, BackwardTensors) and (sentence := self._refusals.get(command.ticket)) is not None:
            raise RequestRefusedError(sentence, 410)

    def accept(self, entry: FutureEntry) -> None:
        """Registers the accepted backward command ``entry``; the forward that it needs is then not dropped."""
        command = entry.command
        if isinstance(command, BackwardTensors) and (own := self._waiting.get(command.ticket)) is not None:
            own.backward = entry

    def record(self, command: Command | None, result: Result, now: float) -> None:
        """Updates the list at the end of ``command``: adds the forward that the command retained, or removes forwards
        that the command used or dropped.

        If ``command`` is None, nothing changes. ``result``: result of the command. ``now``: time of its end in seconds.
        """
        match command:
            case ForwardTensors(model=model, ticket=ticket) if ticket and not isinstance(result, Failure):
                self._waiting.pop(ticket, None)  # a ticket that is used again becomes the newest
                self._waiting[ticket] = _Waiting(model, now)
            case BackwardTensors(ticket=ticket) | DropTicket(ticket=ticket):
                self._waiting.pop(ticket, None)
            case UnloadModel(model=model):
                for ticket in [one for one, own in self._waiting.items() if own.model == model]:
                    del self._waiting[ticket]

    def above(self, size: int) -> Iterator[DropTicket]:
        """Yields a command that drops the oldest retained forward, if ``size`` exceeds the limit of bytes.

        Passes over forwards with a backward that waits or runs. Yields nothing while an earlier drop command has not
        run.

        Args:
            size: bytes that retained forwards take on the rank with most of them.
        """
        self.bytes = size
        if size > self._most_bytes and not any(own.is_dropped for own in self._waiting.values()):
            oldest = next((one for one, own in self._waiting.items() if own.may_drop), None)
            if oldest is not None:
                yield self._dropped(
                    oldest, f"retained forwards took more than serve.held.bytes, {self._most_bytes:,.0f} on a rank"
                )

    def late(self, now: float) -> Iterator[DropTicket]:
        """Yields a drop command for each forward that is over its time limit at ``now`` (seconds), unless a backward of
        it waits or runs, or it is dropped already.
        """
        for ticket, own in list(self._waiting.items()):
            if now - own.since <= self._seconds:
                return
            if own.may_drop:
                yield self._dropped(ticket, f"no backward came within serve.held.seconds, {self._seconds:g}")

    def _dropped(self, ticket: str, why: str) -> DropTicket:
        own = self._waiting[ticket]
        own.is_dropped = True
        self._refusals[ticket] = f"forward {ticket!r} was dropped, because {why}; call forward again."
        while len(self._refusals) > _REFUSALS:
            self._refusals.popitem(last=False)
        return DropTicket(own.model, ticket)
