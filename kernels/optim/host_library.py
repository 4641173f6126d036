"""C++ for the host that is compiled at its first use and kept: in ``~/.cache/trine/compiled``, or below the folder that
the environment variable TRINE_CACHE names; ``TRINE_CACHE=0`` keeps nothing, so nothing is compiled.

A kept file is named by a digest of its source, flags, compiler and CPU, and by one of its own content: a file that was
damaged, or made for another CPU that shares the home, is never loaded. One process compiles and the others wait.
"""

import fcntl
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

logger = logging.getLogger("trine")

FLAGS = (
    *("-std=c++17", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC"),
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),  # none of which changes a bit of a result
)
_LONGEST = 120.0
"""Seconds that a compiler may take."""


class CompileError(Exception):
    """There is no library; its text is the middle of a sentence that says why."""


def library(source: Path) -> Path | None:
    """Path of the compiled ``source``; None if nothing may be kept. Compiling takes seconds, finding milliseconds.

    Raises:
        CompileError: there is no compiler, it refuses, or its result cannot be kept.
    """
    given = os.environ.get("TRINE_CACHE", "")
    if given == "0":
        return None
    compiler = shlex.split(os.environ.get("CXX") or "g++")
    if shutil.which(compiler[0]) is None:
        raise CompileError("there is no C++ compiler (g++, or the one that CXX names)")
    try:
        folder = (Path(given).expanduser() if given else Path.home() / ".cache" / "trine") / "compiled"
        folder.mkdir(parents=True, exist_ok=True)
        command = [*compiler, *FLAGS]
        stem = f"{source.stem}-{_digest(source, command)}"
        with _locked(folder / "lock"):
            return _whole(folder, stem) or _compile(source, command, folder, stem)
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:  # RuntimeError: a user without a home
        raise CompileError(f"its result is not to be had ({error})") from error


def _compile(source: Path, command: list[str], folder: Path, stem: str) -> Path:
    logger.info("%s is compiled for this CPU, once for all runs (%s)", source.name, folder)
    with tempfile.TemporaryDirectory(dir=folder) as place:
        fresh = Path(place) / "library.so"
        done = subprocess.run(
            [*command, str(source), "-o", str(fresh)], check=False, capture_output=True, text=True, timeout=_LONGEST
        )
        if done.returncode:
            said = next((line for line in done.stderr.splitlines() if "error" in line), "without a word")
            raise CompileError(f"{command[0]} refuses to compile it ({said})")
        return fresh.replace(folder / f"{stem}-{_hashed(fresh.read_bytes())}.so")


def _whole(folder: Path, stem: str) -> Path | None:
    """The kept file, if it is as it was made; others of its name are deleted."""
    for found in sorted(folder.glob(f"{stem}-*.so")):
        if found.stem == f"{stem}-{_hashed(found.read_bytes())}":
            return found
        found.unlink()
    return None


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _digest(source: Path, command: list[str]) -> str:
    version = subprocess.run([*command, "--version"], check=False, capture_output=True, timeout=_LONGEST).stdout
    return _hashed(b"\0".join([source.read_bytes(), version, _cpu(), *(word.encode() for word in command)]))


def _cpu() -> bytes:
    """What decides which instructions the CPU has; its model where the system does not say."""
    try:
        told = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        told = []
    lines = sorted({line for line in told if line.lower().startswith(("model name", "flags", "features", "cpu part"))})
    return "\n".join([platform.machine(), platform.processor(), *lines]).encode()


def _hashed(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
