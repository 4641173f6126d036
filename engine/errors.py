"""Errors that a user can meet. Each message is one sentence: what was given, the rule, and what to do."""

import re

COPY_AGAIN = "copy it again, or load another checkpoint."
"""End of messages about a damaged checkpoint."""


class EngineError(Exception):
    """Base of all errors that Trine raises on purpose.

    An engine raises it directly for wrong use: a malformed batch, ``step`` before ``backward``, a loss that is not a
    scalar.
    """


class ConfigError(EngineError):
    """Error about mistakes in the configuration; the message lists all of them with their JSON paths."""


class GridError(EngineError):
    """Error about the ranks: their number does not match the grid, or processes cannot connect to each other."""


class ScheduleError(EngineError):
    """Error about a pipeline schedule that is incomplete, out of order or would deadlock."""


class PlanError(EngineError):
    """Error about a model that cannot be sharded or trained as the configuration demands."""


class CheckpointError(EngineError):
    """Error about a checkpoint that is missing, incomplete, damaged or belongs to another model."""


class LaunchError(EngineError):
    """Error about a job that cannot start on the requested hosts; the message lists every problem with its host."""


class CorruptionError(EngineError):
    """Error about silent data corruption: weights or optimizer state changed between updates, or replicas differ."""


def first_line(error: BaseException) -> str:
    """Returns the first line of the error's message, without a C++ source location; its class name if the message is
    empty.
    """
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return re.sub(r"^(\[[^\[\]\s]*\.(cc|cpp|cxx|h|hpp):\d+\]\s*)+(?=\S)", "", line)
