"""Jobs of several processes that may die: what every rank has said until its end, and how it has ended.

As under torchrun, the store that ranks meet at lives in the process that starts them and survives them all; unlike
``run_ranks`` the process group is the engine's own, exits are real ones, and a dead rank is a result, no error.
"""

import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any, Self


@dataclass(frozen=True)
class Ended:
    """How a rank has ended."""

    code: int | None
    """Of the process, negative for a signal; None: it hung and was killed for it."""
    said: list[Any]
    error: str
    """The traceback, if there was one."""
    at: float
    """When it fell silent, on a monotonic clock."""


@dataclass(frozen=True)
class _Raised:
    text: str


class Launch:
    """``function(line, *arguments)`` on every rank; the function is found by its name, values are pickled."""

    def __init__(
        self, function: Callable[..., None], world_size: int, *arguments: Any, env: Mapping[str, str] | None = None
    ) -> None:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        from tests.ranks import start_server

        start_server()
        context = multiprocessing.get_context("forkserver")
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
        self.processes: list[Any] = []
        self._ends: list[Connection] = []
        self._heard: list[list[Any]] = [[] for _ in range(world_size)]
        self._silent: dict[int, float] = {}
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            place = {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(self._store.port), "TORCHELASTIC_USE_AGENT_STORE": "True",
            }  # fmt: skip
            process = context.Process(target=_enter, args=(theirs, dict(env or {}) | place, function, arguments))
            process.start()
            theirs.close()
            self.processes.append(process)
            self._ends.append(ours)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self.processes:
            process.kill()
            process.join()

    def hear(self, word: Any, seconds: float = 60.0) -> None:
        """Return once every rank that lives has said ``word``."""
        deadline = time.monotonic() + seconds
        while late := [rank for rank in self._living() if word not in self._heard[rank]]:
            assert time.monotonic() < deadline, f"ranks {late} have not said {word!r}: {self._heard}"
            self._listen(deadline)

    def tell(self, word: Any) -> None:
        """Say something to every rank that lives; it takes it with ``Line.hear``."""
        for rank in self._living():
            self._ends[rank].send(word)

    def send(self, number: signal.Signals, *ranks: int) -> None:
        """A signal to these ranks, to all without."""
        for rank in ranks or range(len(self.processes)):
            if self.processes[rank].is_alive():
                os.kill(self.processes[rank].pid, number)

    def end(self, seconds: float = 60.0) -> list[Ended]:
        """Wait for all ranks; those that hang are killed after ``seconds``."""
        deadline = time.monotonic() + seconds
        while self._living() and time.monotonic() < deadline:
            self._listen(deadline)
        ended = []
        for rank, (process, heard) in enumerate(zip(self.processes, self._heard, strict=True)):
            process.join(max(0.0, deadline - time.monotonic()))
            code = process.exitcode
            errors = [word.text for word in heard if isinstance(word, _Raised)]
            said = [word for word in heard if not isinstance(word, _Raised)]
            at = self._silent.get(rank, time.monotonic())
            ended.append(Ended(code, said, errors[0] if errors else "", at))
        return ended

    def _living(self) -> list[int]:
        return [rank for rank, end in enumerate(self._ends) if not end.closed]

    def _listen(self, deadline: float) -> None:
        ends = {self._ends[rank]: rank for rank in self._living()}
        for end in wait(list(ends), timeout=max(0.0, deadline - time.monotonic())):
            rank = ends[end]  # type: ignore[index]
            try:
                self._heard[rank].append(self._ends[rank].recv())
            except (EOFError, ConnectionError):
                self._ends[rank].close()
                self._silent[rank] = time.monotonic()


class Line:
    """A rank's end of the line to the test."""

    def __init__(self, end: Connection) -> None:
        self._end = end

    def __call__(self, word: Any) -> None:
        """Say something."""
        self._end.send(word)

    def hear(self) -> Any:
        """Wait for the test to say something."""
        return self._end.recv()


def _enter(end: Connection, env: dict[str, str], function: Callable[..., None], arguments: Any) -> None:
    """Body of one rank."""
    os.environ.update(env)
    from tests.ranks import as_started_alone

    as_started_alone()
    import torch

    torch.set_num_threads(1)
    # a shell lets what it starts in the background, pytest too, ignore Ctrl-C, and children inherit that
    signal.signal(signal.SIGINT, signal.default_int_handler)
    line = Line(end)
    try:
        function(line, *arguments)
    except Exception:
        line(_Raised(traceback.format_exc()))
        raise SystemExit(1) from None
