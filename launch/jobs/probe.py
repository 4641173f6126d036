"""Probe of a host: reports its versions, code, GPUs and a free port; sent to every host and run there.

Its first line of input is the question. It prints one line of JSON after ``MARK``, since a login may print other lines.
"""

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

MARK = "trine-probe "
SOURCES = (".py", ".json")


def gpu_names(environment: Mapping[str, str] | None = None) -> list[str]:
    """Returns the names of this host's GPUs that CUDA_VISIBLE_DEVICES does not hide, from ``nvidia-smi``.

    ``environment``: variables of the process that will use the GPUs; None: those of this process.

    The list is empty without ``nvidia-smi``.
    """
    given = (os.environ if environment is None else environment).get("CUDA_VISIBLE_DEVICES")
    if shutil.which("nvidia-smi") is None or given == "":
        return []
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    listed = subprocess.run(command, capture_output=True, text=True, check=False)
    names = [line.strip() for line in listed.stdout.splitlines() if line.strip()] if listed.returncode == 0 else []
    if given is None:
        return names
    seen = [word.strip() for word in given.split(",")]
    if not all(word.isdecimal() for word in seen):
        return names[:1] * len(seen) if "-1" not in seen else []
    return [names[int(word)] for word in seen if int(word) < len(names)]


def tell_facts() -> None:
    """Reads the launcher's request, a JSON line, from stdin; prints ``MARK`` and the facts about this host in JSON.

    The request has script, folder and environment of the job; the facts include versions, GPUs and a free port.
    """
    question = json.loads(sys.stdin.readline())
    print(MARK + json.dumps(_answer(question)), flush=True)


def _answer(question: dict[str, Any]) -> dict[str, Any]:
    os.environ.update(question["environment"])
    folder = os.path.isdir(question["folder"])
    if folder:
        os.chdir(question["folder"])
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:0] = [os.path.dirname(os.path.abspath(question["script"])), *map(os.path.abspath, paths)]
    found = importlib.util.find_spec("engine")
    engine = next(iter(found.submodule_search_locations or [""])) if found else ""
    return {
        "folder": folder,
        "python": platform.python_version(),
        "torch": _version("torch"),
        "trine": _version("trine"),
        "script": _digest_of(question["script"]),
        "engine": sources_digest(engine) if engine else "",
        "engine_folder": engine,
        "gpus": gpu_names(),
        "port": _free_port(question["port"]),
        "unknown": [name for name in question["names"] if not _resolves(name)],
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def sources_digest(folder: "str | os.PathLike[str]") -> str:
    """Returns the first 12 hex digits of a SHA-256 digest of all source files in ``folder``; "" if a file cannot be
    read.
    """
    found = [
        os.path.join(base, name)
        for base, _, names in os.walk(folder, followlinks=True)
        for name in names
        if name.endswith(SOURCES) and os.path.basename(base) != "__pycache__"
    ]
    digest = hashlib.sha256()
    for path in sorted(found):
        content = _digest_of(path)
        if not content:
            return ""
        digest.update(f"{os.path.relpath(path, folder)}\0{content}\0".encode())
    return digest.hexdigest()[:12]


def _digest_of(path: str) -> str:
    """Returns the digest of a file's contents; empty if it cannot be read."""
    try:
        with open(path, "rb") as stream:
            return hashlib.sha256(stream.read()).hexdigest()
    except OSError:
        return ""


def _free_port(wish: int | None) -> int:
    """Returns the port, or any free one for 0; 0 if it is taken or none was requested."""
    if wish is None:
        return 0
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", wish))
            listener.listen()
        except OSError:
            return 0
        return int(listener.getsockname()[1])


def _resolves(name: str) -> bool:
    try:
        return bool(socket.getaddrinfo(name, None))
    except OSError:
        return False


if __name__ == "__main__":
    tell_facts()
