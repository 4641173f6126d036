"""Command loop that the main threads of all ranks run: one command at a time, in the order that rank 0 chooses.

rank 0    takes the next command from its source, and sends it to all ranks; without one it sends a beat each second
all       run the command, and compare how it ended
rank 0    gives the result to the source

Ranks wait for messages between host memories (:class:`HostGroup`), so that an idle service neither spins nor occupies
a GPU.
"""

from collections.abc import Callable
from typing import Protocol

from engine.errors import EngineError
from engine.parallel.comm.host_group import HostGroup, announce, collect
from engine.serving.commands import Command, Failure, Result, Stop, decode_message, encode_message

BEAT_SECONDS = 1.0
"""Seconds between beats of an idle service."""
BEAT = b""
RIGHT, BROKEN = b"right", b"broken"
_WIDTH = 8
"""Bytes of the number before an error."""

Run = Callable[[Command], Result]


class CommandSource(Protocol):
    """Interface of rank 0's source of commands, such as the queue of its HTTP server."""

    def take(self, seconds: float) -> tuple[str, Command] | None:
        """Returns (key, next command), or None if no command arrives within ``seconds``.

        ``finish`` needs the key.
        """

    def finish(self, key: str, result: Result, retained: int) -> None:
        """Stores the result of the command that ``take`` returned with ``key``.

        Args:
            retained: bytes of autograd graphs stored for later backwards; the maximum over ranks.
        """


class CommandLoop:
    """Loop in which all ranks run the commands of rank 0's source in the same order.

    Args:
        host: group that sends bytes between all ranks through CPU memory, also from machine to machine.
        run: callback that runs a command on this rank and returns its result.
        spoil: callback for a command that failed on some ranks only, or with different errors; called on all ranks.
        source: source of commands on rank 0; None on other ranks.
        beat: callback for a watchdog, called before each command and once a second when idle.
        retained: callback that returns the bytes of autograd graphs stored on this rank for later backwards.
    """

    def __init__(
        self, host: HostGroup, run: Run, spoil: Callable[[Command], None], source: CommandSource | None = None,
        beat: Callable[[], None] = lambda: None, retained: Callable[[], int] = lambda: 0,
    ) -> None:  # fmt: skip
        if (source is None) == (host.rank == 0):
            given, remedy = ("no source", "pass one") if source is None else ("a source", "leave source out")
            raise EngineError(
                f"CommandLoop got {given} on rank {host.rank}, but rank 0 needs the argument source, and other ranks "
                f"must not have it; {remedy} on rank {host.rank}."
            )
        self._host, self._run, self._spoil, self._source, self._beat = host, run, spoil, source, beat
        self._own_retained, self._retained = retained, 0
        self.made = 0
        """Number of commands run."""

    def run(self) -> None:
        """Runs commands until :class:`Stop`. Every rank calls it.

        Raises:
            EngineError: a rank is lost.
        """
        while True:
            key, command = self._next()
            self._beat()
            if isinstance(command, Stop):
                return
            if command is None:
                continue
            result = self._agreed(command, self._run(command))
            self.made += 1
            if self._source is not None:
                self._source.finish(key, result, self._retained)

    def _next(self) -> tuple[str, Command | None]:
        """Returns the next command, equal on all ranks, with its key on rank 0; None after a beat."""
        taken = self._source.take(BEAT_SECONDS) if self._source is not None else None
        data = announce(self._host, encode_message(taken[1]) if taken is not None else BEAT)
        command: Command | None = decode_message(data) if data else None
        return taken[0] if taken is not None else "", command

    def _agreed(self, command: Command, result: Result) -> Result:
        """Returns the result, or a failure that spoils the model if ranks ended differently."""
        error = result.error if isinstance(result, Failure) else ""
        ends = collect(self._host, self._own_retained().to_bytes(_WIDTH, "little") + error.encode())
        if ends is not None:
            self._retained = max(int.from_bytes(end[:_WIDTH], "little") for end in ends)
            ends = [end[_WIDTH:] for end in ends]
        same = ends is None or len(set(ends)) == 1
        if announce(self._host, RIGHT if same else BROKEN) == RIGHT:
            return result
        self._spoil(command)
        first = next((text.decode() for text in ends or () if text), error)
        return Failure(
            f"the command failed on some ranks only, so its model is unusable until weights are loaded: {first}",
            "server",
        )
