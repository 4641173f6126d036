"""Fair order of commands: deficit round robin over sessions by tokens, training before samples.

internal    entries of the service itself, such as snapshots: before all others
training    sessions in turn, each up to its share of tokens; commands of a session keep their order
samples     the same, after training; one sample follows eight training commands, so that samples never starve
"""

from collections import OrderedDict, deque
from collections.abc import Iterator
from threading import Condition
from time import monotonic

from engine.serving.bookkeeping.entry import INTERNAL, EntryState, FutureEntry

QUANTUM = 4096
"""Tokens that a session gets in its turn."""
SAMPLE_AFTER = 8
"""Training commands after which a waiting sample runs."""


class _Turns:
    """Deficit round robin over the queues of sessions (Shreedhar and Varghese, 1995)."""

    def __init__(self, quantum: int) -> None:
        self._quantum = quantum
        self._queues: OrderedDict[str, deque[FutureEntry]] = OrderedDict()
        self._deficits: dict[str, int] = {}
        self.count = 0

    def put(self, entry: FutureEntry) -> None:
        if entry.session not in self._queues:
            self._queues[entry.session] = deque()
            self._deficits[entry.session] = 0
        self._queues[entry.session].append(entry)
        self.count += 1

    def take(self) -> FutureEntry | None:
        """Removes and returns the next entry."""
        if not self._queues:
            return None
        self._skip_rounds()
        while True:
            session, queue = next(iter(self._queues.items()))
            if queue[0].cost <= self._deficits[session]:
                entry = queue.popleft()
                self.count -= 1
                self._deficits[session] -= entry.cost
                if not queue:
                    self._drop(session)
                return entry
            self._deficits[session] += self._quantum
            self._queues.move_to_end(session)

    def _skip_rounds(self) -> None:
        """Adds the rounds in which no session has enough tokens for its first command."""
        needed = (-(-(queue[0].cost - self._deficits[name]) // self._quantum) for name, queue in self._queues.items())
        rounds = max(0, min(needed) - 1)
        for session in self._deficits if rounds else ():
            self._deficits[session] += rounds * self._quantum

    def _drop(self, session: str) -> None:
        del self._queues[session], self._deficits[session]

    def remove(self, entry: FutureEntry) -> bool:
        queue = self._queues.get(entry.session)
        if queue is None or entry not in queue:
            return False
        queue.remove(entry)
        self.count -= 1
        if not queue:
            self._drop(entry.session)
        return True

    def __iter__(self) -> Iterator[FutureEntry]:
        return (entry for queue in self._queues.values() for entry in queue)


class FairQueue:
    """Queue of commands between the HTTP thread and the command loop, fair to client sessions by deficit round robin.

    Any thread may call its methods.

    Args:
        quantum: tokens that the commands of a session may spend in each round.
    """

    def __init__(self, quantum: int = QUANTUM) -> None:
        self._internal: deque[FutureEntry] = deque()
        self._training, self._samples = _Turns(quantum), _Turns(quantum)
        self._since_sample = 0
        self._changed = Condition()
        self.is_closed = False
        """True once ``close`` was called; ``next`` returns None at once."""

    def put(self, entry: FutureEntry) -> None:
        """Adds the command ``entry`` to the end of the queue of its client session."""
        with self._changed:
            entry.state = EntryState.QUEUED
            if entry.session == INTERNAL:
                self._internal.append(entry)
            else:
                (self._samples if entry.is_sample else self._training).put(entry)
            self._changed.notify()

    def next(self, seconds: float | None = None) -> FutureEntry | None:
        """Removes and returns the command that runs next.

        If the queue is empty, waits for at most ``seconds``, or without limit if ``seconds`` is None. Returns None
        after that time, and once the queue is closed.
        """
        until = None if seconds is None else monotonic() + seconds
        with self._changed:
            while not self.is_closed:
                entry = self._take()
                if entry is not None:
                    entry.state = EntryState.RUNNING
                    return entry
                left = None if until is None else until - monotonic()
                if left is not None and left <= 0:
                    break
                self._changed.wait(left)
            return None

    def _take(self) -> FutureEntry | None:
        if self._internal:
            return self._internal.popleft()
        is_due = self._since_sample >= SAMPLE_AFTER or not self._training.count
        if self._samples.count and is_due:
            self._since_sample = 0
            return self._samples.take()
        self._since_sample += 1
        return self._training.take()

    def remove(self, entry: FutureEntry) -> bool:
        """Removes the command ``entry`` and returns True.

        Returns False if it is not in the queue, for example because it runs already.
        """
        with self._changed:
            return self._training.remove(entry) or self._samples.remove(entry)

    def before(self, entry: FutureEntry) -> int:
        """Returns an estimate, from times of arrival, of the number of queued commands that run before ``entry``.

        For a training command, it counts earlier training commands; for a sampling command, all training commands and
        earlier sampling commands.
        """
        with self._changed:
            rivals = [*self._training, *(self._samples if entry.is_sample else ())]
            return sum(
                one.accepted < entry.accepted or (entry.is_sample and not one.is_sample)
                for one in rivals
                if one is not entry
            )

    def __len__(self) -> int:
        return len(self._internal) + self._training.count + self._samples.count

    def close(self) -> None:
        """Closes the queue: calls of ``next``, also ones that wait at present, return None."""
        with self._changed:
            self.is_closed = True
            self._changed.notify_all()
