"""Parts that the doors to training loops of other libraries share: huggingface, lightning, deepspeed.

arguments       settings of the Hugging Face Trainer and of TRL beside the engine's configuration, and what is refused
loop_settings   settings of a loop of the user's own beside it: accelerate's, Lightning's
hosted_model    the module that a loop calls

Here: the versions of the libraries in whose loops the engine is tested. Nothing here imports them.
"""

import logging
import os
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from types import MappingProxyType

from engine.errors import ConfigError
from engine.parallel.comm.launcher import find_place

logger = logging.getLogger("trine")

TESTED: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "transformers": ("5.17", "5.24"),
        "accelerate": ("1.15", "1.15"),
        "lightning": ("2.6", "2.6"),
        "trl": ("1.16", "1.16"),
    }
)
"""Library -> the first and the last minor version in which all calls that its loop makes are tested."""


def check_versions(*libraries: str) -> None:
    """Warn of libraries of another version than the tested one; refuse those that lack what the engine enters.

    Raises:
        ConfigError: a library is not installed, or of an earlier major version; one sentence about the first of them.
    """
    for library in libraries:
        first, last = TESTED[library]
        tested = first if first == last else f"{first} to {last}"
        remedy = f'install it with pip install "{library}=={last}.*"'
        try:
            found = version(library)
        except PackageNotFoundError:
            raise ConfigError(f"{library} is not installed, and its loop is to run the engine; {remedy}.") from None
        if _minor(found)[0] < _minor(first)[0]:
            raise ConfigError(
                f"{library} is {found}, whose loop lacks calls that the engine enters in {library} {tested}; {remedy}."
            )
        if not _minor(first) <= _minor(found) <= _minor(last):
            _warn(f"{library} is {found}, and the engine is tested inside the loop of {library} {tested}; {remedy}")


def _minor(name: str) -> tuple[int, int]:
    """Return (major, minor) of a version; words behind them, such as dev0, count for nothing."""
    major, minor = name.split(".")[:2]
    return int(major), int(minor)


@cache
def _warn(sentence: str) -> None:
    """Log a sentence once a process, on rank 0."""
    place = find_place(os.environ)
    if place is None or place.rank == 0:
        logger.warning("%s, if a run differs from what its loop promises.", sentence)
