"""The versions of the libraries in whose training loop the engine is tested. Imports none of them."""

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from types import MappingProxyType

from engine.errors import ConfigError

TESTED: Mapping[str, str] = MappingProxyType(
    {"transformers": "5.23", "accelerate": "1.15", "lightning": "2.6", "trl": "1.16"}
)
"""Library -> the minor version in which all calls that its loop makes are tested."""


def refuse_untested(*libraries: str) -> None:
    """Refuse libraries that are missing, or of a version whose loop may differ from the one that is tested.

    Raises:
        ConfigError: one sentence about the first such library.
    """
    for library in libraries:
        tested = TESTED[library]
        remedy = f'install it with pip install "{library}=={tested}.*"'
        try:
            found = version(library)
        except PackageNotFoundError:
            raise ConfigError(f"{library} is not installed, and its loop is to run the engine; {remedy}.") from None
        if found.split(".")[:2] != tested.split("."):
            raise ConfigError(
                f"{library} is {found}, and the engine is tested inside the loop of {library} {tested}; {remedy}."
            )
