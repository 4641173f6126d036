"""Watchdog of a rank: flight recorder, and start of this host's monitor process.

    0 s          the flight file of this rank exists
    some seconds a thread starts the monitor, unless another rank of this host has, and ends
    close        the last rank of a host deletes all flight files, and the monitor ends

A job that ends before the thread wakes up never has a monitor, nor has a rank alone, for which no other rank waits.
"""

import atexit
import contextlib
import faulthandler
import json
import logging
import os
import socket
import subprocess
import sys
import time
from _thread import start_new_thread
from dataclasses import asdict, replace
from pathlib import Path
from threading import Lock
from typing import IO

from engine.config import Config
from engine.config.sections import WatchdogConfig
from engine.errors import first_line
from engine.parallel.comm.flight.flight import FlightFile, rank_runs
from engine.parallel.comm.flight.layout import Phase
from engine.parallel.comm.flight.recorder import FlightRecorder
from engine.parallel.comm.launcher import own_address
from engine.parallel.comm.rendezvous import KeyStore
from engine.parallel.comm.world import watchdog_seconds
from engine.parallel.grid import Grid, axis_groups
from engine.watchdog.local_ranks import ERROR_VARIABLE, STACK_SIGNAL, STACK_SUFFIX, SUFFIX, flight_folder, remove_old
from engine.watchdog.monitor import HubPlace, Orders

logger = logging.getLogger("trine")
_ROOT = Path(__file__).resolve().parents[2]
_MOST_DELAY_SECONDS = 5.0
_POLL_SECONDS = 0.2
_HUB_SECONDS = 60.0
_START = "import sys; sys.path.append(sys.argv[1]); from engine.watchdog.monitor import watch; watch()"
MONITOR_COMMAND = ("-I", "-S", "-c", _START, str(_ROOT))
"""Arguments with which Python starts a monitor process."""


class Watchdog:
    """Watchdog of an engine on this rank, which records the rank's communication and computation in a flight file.

    One rank of each host starts a monitor, a process that reads the flight files. The monitors find the cause of a hang
    and end the job.

    Args:
        store: key-value store of the job; with several ranks, its key prefix must be new in each start of the job.
        job: secret of this job, equal on all ranks.
        config: section ``watchdog`` of the configuration.
        seconds: seconds that a rank may wait for another rank.
        report: folder for the report about a hang; None: the report is only printed.
    """

    def __init__(
        self, grid: Grid, store: KeyStore, job: str, config: WatchdogConfig, seconds: float, report: Path | None
    ) -> None:
        self._store, self._job, self._size, self._config = store, job, grid.size("world"), config
        self._timeout = seconds
        self._report = "" if report is None else str(report.absolute())
        self._folder = flight_folder() / job
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        used = axis_groups(grid)
        identity = {
            "host": socket.gethostname(),
            "stage": grid.coord().pp,
            "axes": {axis: rank_runs(grid.peers(axis)) for axis in used},
            ERROR_VARIABLE: os.environ.get("TORCHELASTIC_ERROR_FILE", ""),
        }
        path = self._folder / f"rank{grid.rank}{SUFFIX}"
        self.recorder = FlightRecorder(path, grid.rank, grid.size("world"), identity)
        self._stack: IO[str] = path.with_suffix(STACK_SUFFIX).open("w")
        faulthandler.register(STACK_SIGNAL, file=self._stack, all_threads=True)
        self._closed, self._stop, self._process = False, Lock(), os.getpid()
        self._stop.acquire()
        atexit.register(self._leave)
        if self._size > 1:
            # threading.Thread and Event take locks, which may be locked when the garbage collector closes an engine
            start_new_thread(self._start_monitor, ())
        else:
            remove_old(self._folder.parent)

    def close(self) -> None:
        """Ends the recording of this rank; a second call does nothing.

        The last rank of a host deletes the host's flight files. While an exception is handled, deletes nothing; instead
        writes the exception's message into this rank's flight file, for the monitor.
        """
        if self._closed or os.getpid() != self._process:  # a forked child must not close its parent's files
            return
        self._stop.release()
        raised = sys.exc_info()[1]
        if isinstance(raised, Exception):
            self.recorder.say(f"{type(raised).__name__}: {first_line(raised)}")
            self._release()
        else:
            atexit.unregister(self._leave)
            self._leave()

    def _leave(self) -> None:
        """Closes everything; the last rank of this host that closes removes the files.

        Until then a monitor that starts late finds that this rank has closed its engine.
        """
        if os.getpid() != self._process:
            return
        self._release()
        # another rank, or the monitor, may remove the folder at any moment here, or still use it
        with contextlib.suppress(OSError):
            if all(map(_closed_well, files := list(self._folder.glob(f"*{SUFFIX}")))):
                for path in files:
                    path.unlink(missing_ok=True)
                    path.with_suffix(STACK_SUFFIX).unlink(missing_ok=True)
            self._folder.rmdir()

    def _release(self) -> None:
        self._closed = True
        self.recorder.close()
        faulthandler.unregister(STACK_SIGNAL)
        self._stack.close()

    def _start_monitor(self) -> None:
        try:
            if not self._stop.acquire(timeout=min(_MOST_DELAY_SECONDS, self._timeout / 4)):
                (self._folder / "monitor").touch(exist_ok=False)
                remove_old(self._folder.parent)
                self._run_monitor()
        except FileExistsError:
            pass  # another rank of this host was first
        except (OSError, RuntimeError, ValueError, subprocess.SubprocessError) as error:
            if not self._closed:
                logger.warning("%s has no watchdog: %s", socket.gethostname(), first_line(error))

    def _run_monitor(self) -> None:
        """Starts the monitor; the first host of the job becomes the hub, and publishes its address in the store."""
        found = None if self._store.add("watchdog/hosts", 1) == 1 else self._find_hub()
        hub = HubPlace(address=own_address()) if found is None else found
        orders = Orders(
            folder=str(self._folder),
            job=self._job,
            host=socket.gethostname(),
            size=self._size,
            timeout=self._timeout,
            slow_factor=self._config.straggler_factor or 0.0,
            slow_steps=self._config.straggler_steps,
            report=self._report,
            hub=hub,
            launched="TORCHELASTIC_RUN_ID" in os.environ,
        )
        done = subprocess.run(
            [sys.executable, *MONITOR_COMMAND],
            input=json.dumps(asdict(orders)) + "\n", stdout=subprocess.PIPE, text=True, check=True,
            start_new_session=True,
        )  # fmt: skip
        if found is None:
            ranks = [int(path.stem.removeprefix("rank")) for path in self._folder.glob(f"*{SUFFIX}")]
            at = replace(hub, port=int(done.stdout), host=socket.gethostname(), ranks=tuple(sorted(ranks)))
            self._store.set("watchdog/hub", json.dumps(asdict(at)))

    def _find_hub(self) -> HubPlace | None:
        """Returns the address of the hub; None if its host publishes none in time, so this host becomes the hub."""
        deadline = time.monotonic() + min(_HUB_SECONDS, self._timeout)
        while not self._store.check(["watchdog/hub"]):
            if self._stop.acquire(timeout=_POLL_SECONDS):
                raise RuntimeError("the engine was closed")
            if time.monotonic() > deadline:
                return None
        return HubPlace(**json.loads(self._store.get("watchdog/hub")))


def _closed_well(path: Path) -> bool:
    """Returns True if a rank of this host has closed its engine and left no message for the monitor."""
    try:
        file = FlightFile(path)
    except OSError:
        return True  # another rank has just removed it
    except ValueError:
        return False  # its rank starts
    try:
        return file.read().phase is Phase.ENDED
    except ValueError:
        return False
    finally:
        file.close()


def open_watchdog(config: Config, grid: Grid, store: KeyStore, job: str) -> Watchdog | None:
    """Returns the watchdog of this rank; None if it is off, or (with a warning) if its flight file cannot be created.

    Args:
        grid: grid of ranks, with the position of this rank.
        store: key-value store of the job; with several ranks, its key prefix must be new in each start of the job.
        job: secret of this job, equal on all ranks.
    """
    if not config.watchdog.enabled:
        return None
    seconds = watchdog_seconds(config.communication.timeout_seconds)
    folder = config.watchdog.folder or config.checkpoint.folder
    report = None if folder is None else Path(folder)
    try:
        return Watchdog(grid, store, job, config.watchdog, seconds, report)
    except OSError as error:
        logger.warning("rank %d has no watchdog: %s", grid.rank, error)
        return None
