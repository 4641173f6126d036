"""Errors that a user can meet. Each is one sentence: what was given, the rule, what to do."""

import re


class EngineError(Exception):
    """Base of all errors that Trine raises on purpose.

    Raised when a running engine is used against its rules: a batch with a wrong leading dim,
    ``step`` before ``backward``, a loss that is not a scalar.
    """


class ConfigError(EngineError):
    """The configuration is wrong; the message lists every problem with its JSON path."""


class GridError(EngineError):
    """Ranks, axes and processes do not fit together, or the processes cannot find each other."""


class ScheduleError(EngineError):
    """A pipeline schedule is incomplete, out of order or would deadlock."""


class PlanError(EngineError):
    """The model and the configuration do not fit together."""


class CheckpointError(EngineError):
    """A checkpoint is missing, incomplete, damaged or belongs to another model."""


class LaunchError(EngineError):
    """A job cannot be started where it was asked for; the message lists every problem, with its host."""


class CorruptionError(EngineError):
    """Bits of weights or optimizer state have changed by themselves, or copies of them differ between ranks."""


def first_line(error: Exception) -> str:
    """Return the first line of the error's message, or its class name if the message is empty.

    A place in C++ source at its beginning is left out: ``[../gloo/transport/tcp/pair.cc:538] Connection closed``.
    """
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return re.sub(r"^(\[[^\[\]\s]*\.(cc|cpp|cxx|h|hpp):\d+\]\s*)+(?=\S)", "", line)
