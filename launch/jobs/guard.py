"""Guard of torchrun on a host: runs it for as long as its launcher is connected.

The source is sent to the host and run there, so it imports only the standard library.

    launcher --ssh--> guard --> torchrun --> ranks

The launcher sends a word per line: ``beat`` every few seconds, ``TERM`` or ``INT`` to pass a signal on, ``KILL`` to end
everything. A closed or silent connection counts as TERM. No descendant outlives the guard, which adopts and ends
orphans. The exit code is torchrun's, or 128 plus the signal's number; never 255, which is ssh's.
"""

import contextlib
import ctypes
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import Any

MARK = "\x1etrine-guard "
"""Prefix of a line of stderr for the launcher only."""
SILENCE_SECONDS = 30.0
AFTER_SECONDS = 1.4
"""Seconds for processes that run on after torchrun, such as the watchdog's monitor."""
SET_CHILD_SUBREAPER = 36
SET_PARENT_DEATH_SIGNAL = 1


def watch_over_torchrun() -> None:
    """Runs torchrun on this host while the launcher is connected over ssh, then exits with torchrun's exit code.

    It reads torchrun's command as a line of JSON from stdin. An older process for the same job is ended first.
    """
    wish = json.loads(sys.stdin.readline())
    libc = ctypes.CDLL(None)
    libc.prctl(SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for number in (signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    words: queue.Queue[str] = queue.Queue()
    place = _take_place(f"\0trine-launch-{wish['key']}")
    os.chdir(wish["folder"])
    try:
        torchrun = subprocess.Popen(
            wish["command"],
            env={**os.environ, **wish["environment"]},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=lambda: libc.prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGTERM, 0, 0, 0),
        )
    except OSError as error:
        print(f"{wish['command'][0]} cannot be started: {error}", file=sys.stderr)
        os._exit(127)
    for work in (lambda: _listen(words), lambda: _make_room(place, words)):  # threads only after the fork
        threading.Thread(target=work, daemon=True).start()
    _attend(torchrun, words, wish)
    _end_descendants()
    code = torchrun.wait()
    with contextlib.suppress(OSError):
        sys.stderr.flush()
    os._exit(
        min(code, 254) if code >= 0 else 128 - code
    )  # a thread still reads the input, which would block a regular exit


def _take_place(name: str) -> socket.socket:
    """Binds a name that one process of a host can have; an older owner ends first."""
    place = socket.socket(socket.AF_UNIX)
    while True:
        try:
            place.bind(name)
            place.listen()
            return place
        except OSError:
            with socket.socket(socket.AF_UNIX) as other, contextlib.suppress(OSError):
                other.connect(name)
                other.recv(1)
        time.sleep(0.05)


def _make_room(place: socket.socket, words: "queue.Queue[str]") -> None:
    """Ends at once when a newer guard connects to the name; the newer one notices the closed connection."""
    held = []
    while True:
        held.append(place.accept()[0])
        words.put("KILL")


def _listen(words: "queue.Queue[str]") -> None:
    for line in sys.stdin:
        words.put(line.strip())
    words.put("gone")


def _attend(torchrun: "subprocess.Popen[bytes]", words: "queue.Queue[str]", wish: dict[str, Any]) -> None:
    """Returns when torchrun has ended, by itself or on request."""
    heard, deadline, met = time.monotonic(), float("inf"), False
    while torchrun.poll() is None:
        try:
            word = words.get(timeout=0.2)
            heard = time.monotonic()
        except queue.Empty:
            word = "gone" if time.monotonic() > heard + SILENCE_SECONDS else ""
        if word in ("TERM", "INT", "gone") and deadline == float("inf"):
            deadline = time.monotonic() + wish["grace"]
            torchrun.send_signal(signal.SIGINT if word == "INT" else signal.SIGTERM)
        if word == "KILL" or time.monotonic() > deadline:
            torchrun.kill()
            _kill(_descendants(), signal.SIGKILL)
        if not met and _connected(wish["port"]):
            met = True
            with contextlib.suppress(OSError):
                print(f"{MARK}joined", file=sys.stderr, flush=True)


def _connected(port: int) -> bool:
    """Returns True if a process here is connected to that port of any host."""
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        with contextlib.suppress(OSError), open(table, encoding="ascii") as stream:
            for row in stream.readlines()[1:]:
                _, _, remote, state, *_ = row.split()
                if state == "01" and int(remote.rpartition(":")[2], 16) == port:
                    return True
    return False


def _end_descendants() -> None:
    """Waits for processes that torchrun left, then sends SIGTERM, then SIGKILL."""
    for number, seconds in ((0, AFTER_SECONDS), (signal.SIGTERM, 0.5), (signal.SIGKILL, 5.0)):
        end = time.monotonic() + seconds
        _kill(_descendants(), number)
        while _descendants() and time.monotonic() < end:
            time.sleep(0.05)


def _kill(processes: list[int], number: int) -> None:
    for process in processes:
        with contextlib.suppress(OSError):
            os.kill(process, number)


def _descendants() -> list[int]:
    """Lists all processes below this one that still run."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if name.isdecimal():
                with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as stream:
                    state, parent, *_ = stream.read().rpartition(")")[2].split()
                if state not in "ZX":
                    children.setdefault(int(parent), []).append(int(name))
    found = list(children.get(os.getpid(), []))
    for process in found:
        found += children.get(process, [])
    return found


if __name__ == "__main__":
    watch_over_torchrun()
