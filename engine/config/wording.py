"""Formatting of values, keys and paths in configuration errors: one line, shortened, without control characters.

A config may hold anything, so text is produced piece by piece until it is long enough: a value may be huge, endlessly
nested, or fail to describe itself.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from numbers import Real as RealNumber

_ROOM = 60
_PATH_ROOM = 200
_PLAIN_KEY = re.compile(rf"[\w$-]{{1,{_ROOM}}}")


def shown_value(value: object) -> str:
    """Returns ``value`` as text for an error: close to JSON, on one line, with at most 60 characters."""
    text = ""
    for piece in _pieces(value):
        text += piece
        if len(text) > _ROOM:
            return text[: _ROOM - 3] + "..."
    return text


def show_path(name: str) -> str:
    """Returns the file path ``name`` as text for an error, on one line. Long text is shortened."""
    if name.isprintable() and 0 < len(name) <= _PATH_ROOM:
        return name
    return shown_value(name) if len(name) <= _PATH_ROOM else printable(name[: _ROOM - 3]) + "..."


def join_path(at: str, key: object) -> str:
    """Returns the JSON path ``at`` extended by ``key``; an unusual key, such as one with a dot, is quoted."""
    word = key if isinstance(key, str) else shown_value(key)
    if not _PLAIN_KEY.fullmatch(word):
        word = shown_value(word)
    return f"{at}.{word}" if at else word


def kind(value: object) -> str:
    """Returns the JSON type of ``value`` in words, such as "an object" for a dict."""
    words = ((bool, "a true/false value"), (type(None), "no value"), (str, "text"), (RealNumber, "a number"),
             (Mapping, "an object"), ((list, tuple), "a list"))  # fmt: skip
    return next((word for types, word in words if isinstance(value, types)), f"a {type(value).__name__}")


def either(numbers: Sequence[int]) -> str:
    """Returns ``numbers`` as text that offers a choice, such as "1, 2 or 4"."""
    words = [str(number) for number in numbers]
    return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def divisors(number: int) -> list[int]:
    """Returns the divisors of ``number`` that are at most 4,096, in ascending order."""
    return [size for size in range(1, min(number, 4096) + 1) if number % size == 0]


def printable(text: str) -> str:
    """Returns ``text`` with escape sequences in place of invisible characters, such as control characters."""
    return "".join(letter if letter.isprintable() else json.dumps(letter)[1:-1] for letter in text)


def _pieces(value: object) -> Iterator[str]:
    """Yields JSON text piece by piece; each level adds a character or more, so a reader that stops limits the depth."""
    if isinstance(value, str):
        yield printable(json.dumps(value[:_ROOM], ensure_ascii=False))
    elif isinstance(value, Mapping):
        entries = (chain(_pieces(key), (": ",), _pieces(entry)) for key, entry in value.items())
        yield from chain("{", _listed(entries), "}")
    elif isinstance(value, (list, tuple)):
        yield from chain("[", _listed(map(_pieces, value)), "]")
    else:
        yield _atom(value)


def _listed(entries: Iterable[Iterable[str]]) -> Iterator[str]:
    for index, entry in enumerate(entries):
        yield ", " if index else ""
        yield from entry


def _atom(value: object) -> str:
    for write in (json.dumps, repr):
        try:
            return printable(write(value))
        except (TypeError, ValueError, RecursionError):
            continue
    return "a number of thousands of digits" if isinstance(value, RealNumber) else f"a {type(value).__name__}"
