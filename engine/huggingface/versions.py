"""The versions of the libraries in whose training loop the engine is tested. Imports none of them."""

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from types import MappingProxyType

from engine.errors import ConfigError

TESTED: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "transformers": ("5.17", "5.24"),
        "accelerate": ("1.15", "1.15"),
        "lightning": ("2.6", "2.6"),
        "trl": ("1.16", "1.16"),
    }
)
"""Library -> the first and the last minor version in which all calls that its loop makes are tested."""


def refuse_untested(*libraries: str) -> None:
    """Refuse libraries that are missing, or of a version whose loop may differ from the one that is tested.

    Raises:
        ConfigError: one sentence about the first such library.
    """
    for library in libraries:
        first, last = TESTED[library]
        tested = first if first == last else f"{first} to {last}"
        remedy = f'install it with pip install "{library}=={last}.*"'
        try:
            found = version(library)
        except PackageNotFoundError:
            raise ConfigError(f"{library} is not installed, and its loop is to run the engine; {remedy}.") from None
        if not _minor(first) <= _minor(found) <= _minor(last):
            raise ConfigError(
                f"{library} is {found}, and the engine is tested inside the loop of {library} {tested}; {remedy}."
            )


def _minor(name: str) -> tuple[int, int]:
    """Return (major, minor) of a version; words behind them, such as dev0, count for nothing."""
    major, minor = name.split(".")[:2]
    return int(major), int(minor)
