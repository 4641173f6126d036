"""Output of a process that ends with an :class:`EngineError`: one sentence instead of a traceback on every rank.

    the user's line   the line of the script that called the engine
    the sentence      what was given, the rule, what to do
    torchrun          reads the sentence from this rank's error file and ends its summary with it

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
"""Folder of the engine; frames of a traceback below it are not the user's."""
CONSEQUENCES = ("A peer has probably stopped", "see the error of the rank that failed")
"""Phrases in the error of a rank that failed only because another rank had failed before."""
_AFTER_SECONDS = 2
_DECORATOR = os.path.join("torch", "utils", "_contextlib.py")


class FailureMessage:
    """``sys.excepthook`` that prints an uncaught EngineError as one sentence instead of a traceback.

    The constructor installs it, and ``close`` removes it.
    """

    def __init__(self) -> None:
        self.closed = False
        self.heard: Callable[[str], None] | None = None
        """Callback that receives, as one line, any exception that ends this process."""
        self.previous = sys.excepthook
        sys.excepthook = self

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Shows the exception that ends this process."""
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
        """Restores the previous ``sys.excepthook``.

        If called while an EngineError is being raised, restores the hook only once the error object is freed.
        """
        raised = sys.exc_info()[1]
        if isinstance(raised, EngineError):
            weakref.finalize(raised, self._give_back).atexit = False
        else:
            self._give_back()

    def _give_back(self) -> None:
        self.closed = True
        while isinstance(sys.excepthook, FailureMessage) and sys.excepthook.closed:
            sys.excepthook = sys.excepthook.previous  # a hook that others have wrapped only forwards its calls


def _place(trace: TracebackType | None) -> list[str]:
    """Returns the line of the user's code that called the engine: the last frame before the engine's own."""
    frames = traceback.extract_tb(trace)
    inside = next((i for i, frame in enumerate(frames) if Path(frame.filename).is_relative_to(PACKAGE)), len(frames))
    # other frames are generated code, and torch's wrapper of functions without gradients
    real = [
        frame for frame in frames[:inside] if not frame.filename.startswith("<") and _DECORATOR not in frame.filename
    ]
    return [f'File "{frame.filename}", line {frame.lineno}: {frame.line}' for frame in real[-1:]]


def _error_file() -> Path | None:
    """Returns torchrun's error file of this rank: ``<attempt>/<local rank>/error.json``."""
    name = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
    return Path(name) if name else None


def _is_first(sentence: str) -> bool:
    """Returns True on the first rank of this node with this sentence, which creates a file in the attempt's folder."""
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
    """Returns True if the error message ``words`` is from a rank that failed because another rank had failed."""
    return any(part in words for part in CONSEQUENCES)


def torchrun_error(sentence: str) -> str:
    """Returns the JSON text of the error file that reports this rank's failure ``sentence`` to torchrun.

    torchrun takes the earliest file as root cause. If ``sentence`` is a consequence of another rank's failure (see
    ``is_consequence``), its timestamp is 2 seconds in the future.
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
        print(f"torchrun does not get the error, because {file} cannot be written: {error}", file=sys.stderr)
