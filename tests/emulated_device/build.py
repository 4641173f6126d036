"""Compile the emulated device, once for each state of its sources and version of torch."""

import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

SOURCES = Path(__file__).parent / "source"
TORCH = Path(torch.__file__).parent
FLAGS = ("-std=c++20", "-O1", "-shared", "-fPIC")


def library() -> Path:
    """Path of the compiled library; compiling takes about ten seconds of one core, finding it none.

    Raises:
        RuntimeError: there is no C++ compiler, or it refuses; with what it says.
    """
    made = _cache() / f"emulated-device-{_digest()}.so"
    made.parent.mkdir(parents=True, exist_ok=True)
    with (made.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the others of a run wait for the first
        if not made.exists():
            _compile(made)
    return made


def _compile(made: Path) -> None:
    with tempfile.TemporaryDirectory(dir=made.parent) as folder:
        fresh = Path(folder) / made.name
        command = _command(fresh)
        if shutil.which(command[0]) is None:
            raise RuntimeError(
                f"tests of devices need the C++ compiler {command[0]!r}: install it, or name one in CXX."
            )
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"the emulated device does not compile:\n{done.stderr}")
        fresh.replace(made)


def _cache() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "trine-tests"


def _digest() -> str:
    told = hashlib.sha256(f"{torch.__version__} {FLAGS}".encode())
    for source in sorted(SOURCES.iterdir()):
        told.update(source.read_bytes())
    return told.hexdigest()[:16]


def _command(target: Path) -> list[str]:
    includes = [f"-I{TORCH / 'include'}", f"-I{TORCH / 'include/torch/csrc/api/include'}"]
    libraries = [f"-L{TORCH / 'lib'}", "-lc10", "-ltorch_cpu"]
    compiler = os.environ.get("CXX", "g++")
    return [compiler, *FLAGS, *includes, str(SOURCES / "device.cpp"), "-o", str(target), *libraries]
