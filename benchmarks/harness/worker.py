"""A worker process that serves one request at a time; its errors, hangs and crashes leave the caller running.

    with Worker(make, arguments) as worker:         make(*arguments) runs in the process and gives what answers
        worker.ask(("measure", 3), seconds=90)

An error inside comes back as ``WorkerError`` with its last line, and the process goes on; after one that it cannot go
on from (``WorkerError.ended``) a new one has to be started.
"""

import multiprocessing
import pickle
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Self

Answerer = Callable[..., Any]
FAREWELL_SECONDS = 5.0


class WorkerError(Exception):
    """Error of a request; ``ended``: the process has ended."""

    def __init__(self, message: str, ended: bool = False, trace: str = "") -> None:
        super().__init__(message)
        self.ended = ended
        self.trace = trace


class Worker:
    """Process that runs ``make(*arguments)`` and calls the result with each request."""

    def __init__(self, make: Callable[..., Answerer], arguments: tuple[Any, ...]) -> None:
        context = multiprocessing.get_context("spawn")
        self._end, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, make, arguments)
        )  # no daemon: compilers have children
        self._process.start()
        theirs.close()
        self._farewell_seconds = FAREWELL_SECONDS

    def post(self, request: tuple[Any, ...]) -> None:
        """Sends a request without waiting; :meth:`receive` returns the answer."""
        try:
            self._end.send(request)
        except OSError:
            raise WorkerError("the process died before it was asked", ended=True) from None

    def receive(self, seconds: float) -> Any:
        """Returns the answer to the oldest unanswered request.

        Raises:
            WorkerError: the request raised, the process died, or the answer timed out; the last two end the process.
        """
        if not self._end.poll(max(seconds, 0.0)):
            self._farewell_seconds = 0.0
            self.close()
            raise WorkerError(f"no answer within {seconds:.0f} s", ended=True)
        try:
            ok, answer = pickle.loads(self._end.recv_bytes())
        except (EOFError, OSError):
            self._process.join()
            raise WorkerError(f"the process died, exit code {self._process.exitcode}", ended=True) from None
        if not ok:
            raise WorkerError(answer[0], trace=answer[1])
        return answer

    def ask(self, request: tuple[Any, ...], seconds: float) -> Any:
        """Sends a request to the process and returns its answer."""
        self.post(request)
        return self.receive(seconds)

    def close(self) -> None:
        """Ends the process, by a kill if it does not end itself."""
        self._end.close()
        self._process.join(self._farewell_seconds)
        self._process.kill()
        self._process.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _serve(end: Connection, make: Callable[..., Answerer], arguments: tuple[Any, ...]) -> None:
    answerer: Answerer | None = None
    while True:
        try:
            request = end.recv()
        except EOFError:
            return
        try:
            answerer = answerer or make(*arguments)
            answer = True, answerer(*request)
        except Exception as error:
            answer = False, (last_line(error), traceback.format_exc())
        end.send_bytes(pickle.dumps(answer))


def last_line(error: BaseException) -> str:
    """Formats an error in one line."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:400]
