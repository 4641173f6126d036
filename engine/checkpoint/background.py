"""One thing at a time in a thread of its own: the writing half of a save."""

import threading
from collections.abc import Callable
from pathlib import Path

from engine.errors import CheckpointError, EngineError


class PendingSave:
    """A save under way. ``wait`` for its end; nobody has to, a failure is logged."""

    def __init__(self, work: Callable[[], Path], told: Callable[["PendingSave"], None], background: bool) -> None:
        self.folder: Path | None = None
        """The checkpoint, once it is committed."""
        self.problem: Exception | None = None
        self._work, self._told = work, told
        # not a daemon: the interpreter waits for it at its exit, so that a save that was begun is ended
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=False)
        if background:
            self._thread.start()
        else:
            self._run()

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return not self._thread.is_alive()

    def join(self) -> None:
        """Block until it has ended."""
        if self._thread.ident is not None:
            self._thread.join()

    def wait(self) -> Path:
        """Block until it has ended; the folder of the checkpoint.

        Raises:
            CheckpointError: why there is none.
        """
        self.join()
        if self.problem is not None:
            raise self.problem
        assert self.folder is not None, "a save that has ended well has a folder"
        return self.folder

    def _run(self) -> None:
        try:
            self.folder = self._work()
        except EngineError as error:
            self.problem = error
        except Exception as error:  # a thread's exception would be printed and forgotten
            self.problem = CheckpointError(f"not saved: {type(error).__name__}, {error}.")
            self.problem.__cause__ = error
        self._told(self)
