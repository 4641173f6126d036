"""Facts about the served model that the HTTP side checks requests against."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Facts about the base model of a service, such as names and context length, for checks of requests."""

    names: tuple[str, ...]
    """Names by which clients ask for it; the first one is its own."""
    context: int
    """Maximum tokens of a sequence."""
    vocabulary: int
    """Number of token ids."""
    ends: tuple[int, ...] = ()
    """Tokens that end a sample unless the client gives its own."""
    architecture: str = ""
    grid: str = ""
    """Grid of the ranks, for people."""
    tokenize: Callable[[str], list[int]] | None = None
    """Function that returns the tokens of a text, for stop strings; None: they are refused."""
