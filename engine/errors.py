"""Errors that a user can meet. Each message is one sentence: what was given, the rule, and what to do."""

import re

COPY_AGAIN = "copy it again, or load another checkpoint."
"""End of messages about a damaged checkpoint."""


class EngineError(Exception):
    """Base of all errors that Trine raises on purpose.

    Raised when a running engine is used against its rules: a batch with a wrong leading dim, ``step`` before
    ``backward``, a loss that is not a scalar.
    """


class ConfigError(EngineError):
    """Error about mistakes in the configuration; the message lists all of them with their JSON paths."""


class GridError(EngineError):
    """Error about the grid of ranks and the processes: their numbers do not match, or processes cannot connect to each
    other.
    """


class ScheduleError(EngineError):
    """Error about a pipeline schedule that is incomplete, out of order or would deadlock."""


class PlanError(EngineError):
    """Error about a model that cannot be sharded or trained as the configuration demands."""


class CheckpointError(EngineError):
    """Error about a checkpoint that is missing, incomplete, damaged or belongs to another model."""


class LaunchError(EngineError):
    """Error about a job that cannot be started on the requested hosts; the message lists every problem with its
    host.
    """


class CorruptionError(EngineError):
    """Error about silent data corruption: bits of weights or optimizer state have changed between updates, or copies
    that ranks must have equal differ.
    """


def first_line(error: BaseException) -> str:
    """Returns the first line of the message of ``error``, or the name of its class if the message is empty.

    A C++ source location at the start of the line, such as ``[../gloo/transport/tcp/pair.cc:538]``, is removed.
    """
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return re.sub(r"^(\[[^\[\]\s]*\.(cc|cpp|cxx|h|hpp):\d+\]\s*)+(?=\S)", "", line)
