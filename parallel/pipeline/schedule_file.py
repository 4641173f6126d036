"""Schedules in files: a line of action tokens a rank, as ``trine schedule --tokens`` prints them."""

from pathlib import Path

from engine.errors import ScheduleError
from engine.parallel.pipeline.schedule import Schedule, parse_schedule

ENDINGS = (".txt", ".csv")
"""Where a configuration or the command line names a schedule, these are files and all else are kinds."""


def read_schedule(path: str) -> Schedule:
    """The schedule of a file, which ``check`` has still to prove; its name is the path.

    Raises:
        ScheduleError: it cannot be read, or is none.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ScheduleError(f"schedule {path}: {error.strerror}; give the path of a file of actions.") from None
    except UnicodeDecodeError:
        raise ScheduleError(f"schedule {path} is no text; give a file of actions such as 0F0 0B0.") from None
    return parse_schedule(text, path)
