"""Where the flight files of a host lie."""

import contextlib
import os
import shutil
import tempfile
import time
from pathlib import Path

_OLD_SECONDS = 24 * 3600


def flight_folder() -> Path:
    """Where this user's flight files lie on this host: in memory where that is possible. Old ones are removed."""
    memory = Path("/dev/shm")
    folder = (memory if os.access(memory, os.W_OK) else Path(tempfile.gettempdir())) / f"trine-{os.getuid()}"
    folder.mkdir(exist_ok=True, mode=0o700)
    if folder.stat().st_uid != os.getuid():
        raise OSError(f"{folder} belongs to another user")
    for old in folder.iterdir():
        with contextlib.suppress(OSError):
            if time.time() - old.stat().st_mtime > _OLD_SECONDS:
                shutil.rmtree(old)
    return folder
