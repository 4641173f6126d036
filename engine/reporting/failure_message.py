"""The last words of a process that an :class:`EngineError` ends: its sentence, once, instead of tracebacks.

    the user's line   where the script called the engine
    the sentence      what was given, the rule, what to do
    torchrun          finds the sentence in the error file of this rank and ends its summary with it

Any other exception is shown as usual. ``logging.getLogger("trine").setLevel(logging.DEBUG)`` shows tracebacks, too.
"""

import json
import logging
import os
import sys
import time
import traceback
import weakref
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from types import TracebackType

from engine.errors import EngineError, first_line

logger = logging.getLogger("trine")

PACKAGE = Path(__file__).parents[1]
"""The folder of the engine, whose frames are not the user's."""
CONSEQUENCES = ("A peer has probably stopped", "see the error of the rank that failed")
"""Parts of the words of a rank that another one has taken down."""
_AFTER_SECONDS = 2
_DECORATOR = os.path.join("torch", "utils", "_contextlib.py")


class FailureMessage:
    """Replaces ``sys.excepthook`` until ``close``.

    Where ``close`` is called because of an EngineError, which then leaves the script or is caught, the hook stays as
    long as that error lives, since it may be the one that ends the process.
    """

    def __init__(self) -> None:
        self.closed = False
        self.heard: Callable[[str], None] | None = None
        """Is told of any exception that ends this process, in a line."""
        self.previous = sys.excepthook
        sys.excepthook = self

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Show the exception that ends this process."""
        if self.heard is not None:
            self.heard(f"{kind.__name__}: {first_line(error) if isinstance(error, Exception) else error}")
        if self.closed or not isinstance(error, EngineError) or logger.isEnabledFor(logging.DEBUG):
            self.previous(kind, error, trace)
        if self.closed or not isinstance(error, EngineError):
            return
        sentence = f"{kind.__name__}: {error}"
        if _is_first(sentence):
            print(*_place(trace), sentence, sep="\n", file=sys.stderr, flush=True)
        _tell_torchrun(sentence)

    def close(self) -> None:
        """Give the hook back, now or when the EngineError that is being raised is gone. A second call does nothing."""
        raised = sys.exc_info()[1]
        if isinstance(raised, EngineError):
            weakref.finalize(raised, self._give_back).atexit = False
        else:
            self._give_back()

    def _give_back(self) -> None:
        self.closed = True
        while isinstance(sys.excepthook, FailureMessage) and sys.excepthook.closed:
            sys.excepthook = sys.excepthook.previous  # one that others have wrapped since passes everything on


def _place(trace: TracebackType | None) -> list[str]:
    """The line of the user's code that called the engine: the last frame before the engine's own."""
    frames = traceback.extract_tb(trace)
    inside = next((i for i, frame in enumerate(frames) if Path(frame.filename).is_relative_to(PACKAGE)), len(frames))
    # others are generated code, and torch's wrapper of functions that run without gradients
    real = [
        frame for frame in frames[:inside] if not frame.filename.startswith("<") and _DECORATOR not in frame.filename
    ]
    return [f'File "{frame.filename}", line {frame.lineno}: {frame.line}' for frame in real[-1:]]


def _error_file() -> Path | None:
    """Where torchrun looks for the error of this rank: ``<attempt>/<local rank>/error.json``."""
    name = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
    return Path(name) if name else None


def _is_first(sentence: str) -> bool:
    """Whether no other rank of this node says the same: the first one leaves a mark in the folder of the attempt."""
    if (file := _error_file()) is None:
        return True
    mark = file.parents[1] / f"trine-{sha256(sentence.encode(errors='replace')).hexdigest()[:16]}"
    try:
        mark.touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:
        return True
    return True


def is_consequence(words: str) -> bool:
    """Whether these words of a rank blame another one."""
    return any(part in words for part in CONSEQUENCES)


def torchrun_error(sentence: str) -> str:
    """The error file of a rank, in the form of torch's ErrorHandler; what that calls a call stack is what it prints.

    torchrun takes the earliest one for the root cause, by whole seconds: a consequence gets a later time.
    """
    late = _AFTER_SECONDS if is_consequence(sentence) else 0
    told = {"py_callstack": sentence, "timestamp": str(int(time.time()) + late)}
    return json.dumps({"message": {"message": sentence, "extraInfo": told}})


def _tell_torchrun(sentence: str) -> None:
    if (file := _error_file()) is None:
        return
    try:
        file.write_text(torchrun_error(sentence), encoding="utf-8")
    except OSError as error:
        print(f"torchrun is not told, {file} cannot be written: {error}", file=sys.stderr)
