"""Where the flight files of a host lie."""

import contextlib
import os
import shutil
import stat
import tempfile
import time
from pathlib import Path

_OLD_SECONDS = 24 * 3600


def flight_folder() -> Path:
    """Where this user's flight files lie on this host: in memory where that is possible."""
    memory = Path("/dev/shm")
    folder = (memory if os.access(memory, os.W_OK) else Path(tempfile.gettempdir())) / f"trine-{os.getuid()}"
    folder.mkdir(exist_ok=True, mode=0o700)
    there = folder.lstat()  # everybody may write beside it, so it may be a link to what is not ours to clean up
    if not stat.S_ISDIR(there.st_mode) or there.st_uid != os.getuid() or there.st_mode & 0o022:
        raise OSError(f"{folder} is no folder that only this user can write; remove it")
    return folder


def remove_old(folder: Path) -> None:
    """Remove what jobs have left there a day ago."""
    for old in folder.iterdir():
        with contextlib.suppress(OSError):
            if time.time() - old.stat().st_mtime > _OLD_SECONDS:
                shutil.rmtree(old)
