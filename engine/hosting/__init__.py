"""Code shared by the integrations of other training loops: huggingface, lightning, deepspeed.

arguments       arguments of the Hugging Face Trainer and of TRL, merged with the engine's configuration
loop_settings   settings of accelerate and Lightning, merged with it
hosted_model    the module that another library's loop calls

This file lists the tested versions of the libraries. Nothing here imports them.
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
"""Library -> first and last minor version with which the integration is tested."""


def check_versions(*libraries: str) -> None:
    """Checks the installed versions of ``libraries``, such as "transformers"; logs a warning for an untested version.

    Raises:
        ConfigError: a library is not installed, or its major version is too old.
    """
    for library in libraries:
        first, last = TESTED[library]
        tested = first if first == last else f"{first} to {last}"
        remedy = f'install it with pip install "{library}=={last}.*"'
        try:
            found = version(library)
        except PackageNotFoundError:
            raise ConfigError(f"{library} is not installed, but its loop has to run the engine; {remedy}.") from None
        if _minor(found)[0] < _minor(first)[0]:
            raise ConfigError(
                f"{library} is {found}, whose loop lacks calls that the engine overrides in {library} {tested}; "
                f"{remedy}."
            )
        if not _minor(first) <= _minor(found) <= _minor(last):
            _warn(f"{library} is {found}, but the engine is tested inside the loop of {library} {tested}; {remedy}")


def _minor(name: str) -> tuple[int, int]:
    """Returns (major, minor) of a version; suffixes such as dev0 are ignored."""
    major, minor = name.split(".")[:2]
    return int(major), int(minor)


@cache
def _warn(sentence: str) -> None:
    """Logs a sentence once a process, on rank 0."""
    place = find_place(os.environ)
    if place is None or place.rank == 0:
        logger.warning("%s, if a run differs from what its loop promises.", sentence)
