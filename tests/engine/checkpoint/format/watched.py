"""Loads checkpoints one by one and says what happened: ``python watched.py SOUND RUN...`` prints a line for each.

Watches what Python does meanwhile (pickle, exec, compile, processes, files outside the run) and the memory it takes.
"""

import json
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

from engine.checkpoint.format.filesystem import Files
from engine.checkpoint.format.step_reader import StepReader
from engine.engine import Engine
from tests.zero import small

CODE = ("pickle.find_class", "exec", "compile", "import", "os.system", "os.exec", "os.posix_spawn", "os.fork")
SECONDS = 20


class Watch:
    """An audit hook that counts while it is on; hooks cannot be taken off."""

    def __init__(self) -> None:
        self.inside: str | None = None
        """The folder that may be opened; None: off."""
        self.seen: list[str] = []
        sys.addaudithook(self._note)

    def _note(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.inside is None:
            return
        if event in CODE or event.startswith("subprocess."):
            self.seen.append(f"{event} {str(arguments)[:80]}")
        elif event == "open" and isinstance(arguments[0], str | bytes):
            path = arguments[0] if isinstance(arguments[0], str) else arguments[0].decode()
            if ".." in path or (path.startswith("/") and not path.startswith(self.inside)):
                self.seen.append(f"open {path[:80]}")


def peak_bytes() -> int:
    """The most memory that was resident since :func:`forget_peak`."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))


def forget_peak() -> None:
    with open("/proc/self/clear_refs", "w") as refs:
        refs.write("5")


def attempt(eng: Engine, run: Path, watch: Watch) -> dict[str, Any]:
    """Load, and if that goes well verify, which reads the rest."""
    forget_peak()
    before, started, error = peak_bytes(), time.perf_counter(), None
    signal.alarm(SECONDS)
    watch.seen, watch.inside = [], str(run)
    try:
        eng.load_checkpoint(run)
        StepReader(Files(), next(run.glob("step-*"))).verify()
    except BaseException as problem:
        error = problem
    finally:
        watch.inside = None
        signal.alarm(0)
    return {
        "run": run.name, "error": type(error).__name__, "message": str(error)[:400], "code": watch.seen,
        "bytes": peak_bytes() - before, "seconds": time.perf_counter() - started,
    }  # fmt: skip


def main() -> None:
    """The sound one first and last: what is loaded lazily is loaded, and attacks have left nothing."""
    sound, *runs = map(Path, sys.argv[1:])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    watch = Watch()
    with small.start({}) as eng:
        eng.train_batch(small.batch(eng, 0))
        for run in (sound, runs[0], sound, *runs, sound):
            print(json.dumps(attempt(eng, run, watch)), flush=True)


if __name__ == "__main__":
    main()
