"""Files that the launcher writes for a scheduler, and that it may replace."""

from pathlib import Path

from engine.errors import LaunchError

WRITTEN = "# Written by trine launch"
"""Files with this line are replaced by the next one."""


def write_job_file(path: Path, text: str) -> None:
    """Write a file of the launcher, never over one that somebody else has written.

    Raises:
        LaunchError: there is another file, or it cannot be written.
    """
    try:
        if path.exists() and WRITTEN not in path.read_text(encoding="utf-8", errors="replace"):
            raise LaunchError(f"{path} exists, and trine launch has not written it; give another --out, or move it.")
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise LaunchError(f"{path} cannot be written ({error.strerror}); give another --out.") from error
