"""What is promised when something goes wrong, the command that shows it, and how its figure is read. Pure data."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Read = Callable[[str], str]
"""From what a command has printed, or from the file of a figure, to the words of a cell.

Raises:
    LookupError: the figure is not there.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """A row of the table: one promise, and one command that tries it."""

    goal: str
    """R1 to R16."""
    about: str
    asked: str
    """What the goal asks for."""
    command: str
    """``pytest ...`` or ``python -m ...``, as it is typed."""
    read: Read
    figure: str = ""
    """The command takes long and keeps a figure of its own under this name: it is read from there, and not run."""

    @property
    def row(self) -> str:
        """Its first cell."""
        return f"{self.goal} {self.about}"


def passed(words: str) -> Read:
    """``words`` with the number of tests that have passed in the place of ``{}``."""
    return counted(r"(\d+) passed", words)


def counted(pattern: str, words: str) -> Read:
    """``words`` with the sum of all numbers that ``pattern`` finds in the place of ``{}``."""

    def read(said: str) -> str:
        numbers = [int(number) for number in re.findall(pattern, said)]
        if not numbers:
            raise LookupError(f"nothing in the output is like {pattern!r}")
        return words.format(f"{sum(numbers):,}")

    return read


def found(pattern: str, words: str = "{}") -> Read:
    """``words`` with what the groups of ``pattern`` find first in the place of ``{}``."""

    def read(said: str) -> str:
        match = re.search(pattern, said)
        if match is None:
            raise LookupError(f"nothing in the output is like {pattern!r}")
        return words.format(*match.groups())

    return read


def largest(pattern: str, words: str) -> Read:
    """``words`` with the count of the numbers that ``pattern`` finds, and the largest one."""

    def read(said: str) -> str:
        numbers = [float(number) for number in re.findall(pattern, said)]
        if not numbers:
            raise LookupError(f"nothing in the output is like {pattern!r}")
        return words.format(len(numbers), max(numbers))

    return read


def both(first: Read, second: Read) -> Read:
    """The words of two readers."""
    return lambda said: f"{first(said)}, {second(said)}"


def of_table(read: Callable[[Mapping[str, Mapping[str, str]]], str]) -> Read:
    """Words about the rows of a figure that is a table."""

    def from_file(text: str) -> str:
        data: dict[str, Any] = json.loads(text)
        return read(data["rows"])

    return from_file
