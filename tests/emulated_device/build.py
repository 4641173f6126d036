"""Compile the emulated device, once for each state of its sources and version of torch."""

import hashlib
import os
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
        RuntimeError: the compiler refuses; with what it says.
    """
    made = _cache() / f"emulated-device-{_digest()}.so"
    if made.exists():
        return made
    made.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=made.parent) as folder:
        fresh = Path(folder) / made.name
        done = subprocess.run(_command(fresh), check=False, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"the emulated device does not compile:\n{done.stderr}")
        fresh.replace(made)  # whoever compiles at the same time makes the same file
    return made


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
