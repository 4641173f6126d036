"""Messages as JSON values, read strictly into their dataclasses: no field is missing, unknown or of another type."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from math import prod
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from engine.checkpoint.format.pieces import Piece

_LARGEST = 2**62
"""Bound of integers, so that sums and products of two of them cause no surprise in int64."""
_DIMS = 16
_NOT_FINITE = ("nan", "inf", "-inf")
T = TypeVar("T")


def from_json(kind: type[T], value: Any, at: str, least: int = 0) -> T:
    """Returns the JSON value ``value`` as an instance of the message class ``kind``, with strict type checks.

    Args:
        at: name of ``value`` in errors, such as "reply".
        least: smallest integer that a field may have.

    Raises:
        ValueError: a field is missing, is unknown, has a wrong type, or is too small.
    """
    read: T = _read(kind, value, at, least)
    return read


def _read(kind: Any, value: Any, at: str, least: int) -> Any:
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin is UnionType:
        (other,) = (one for one in inner if one is not NoneType)
        return None if value is None else _read(other, value, at, least)
    if origin is tuple or origin is Sequence:
        return _read_list(inner, value, at, least)
    if origin is Mapping:
        entries = _checked(value, dict, at).items()
        return {_key(inner[0], key, at): _read(inner[1], entry, f"{at}.{key}", least) for key, entry in entries}
    if is_dataclass(kind):
        return _read_message(kind, value, at, least)
    if issubclass(kind, Enum):
        try:
            return kind(value)
        except ValueError:
            raise ValueError(f"{at} is {_shown(value)}") from None
    return _read_number(kind, value, at, least) if kind in (int, float) else _checked(value, kind, at)


def _read_list(inner: tuple[Any, ...], value: Any, at: str, least: int) -> tuple[Any, ...]:
    entries = _checked(value, list, at)
    if len(inner) == 1 or inner[1] is Ellipsis:
        return tuple(_read(inner[0], entry, f"{at}[{i}]", least) for i, entry in enumerate(entries))
    if len(entries) != len(inner):
        raise ValueError(f"{at} has {len(entries)} entries instead of {len(inner)}")
    return tuple(
        _read(one, entry, f"{at}[{i}]", least) for i, (one, entry) in enumerate(zip(inner, entries, strict=True))
    )


def _read_message(kind: Any, value: Any, at: str, least: int) -> Any:
    given, known = _checked(value, dict, at), _hints(kind)
    if given.keys() != known.keys():
        wrong = sorted(given.keys() ^ known.keys())
        raise ValueError(f"{at}.{wrong[0][:40]} is {'missing' if wrong[0] in known else 'no field of this message'}")
    message = kind(**{name: _read(one, given[name], f"{at}.{name}", least) for name, one in known.items()})
    if isinstance(message, Piece):
        _check_piece(message, at)
    return message


def _read_number(kind: type[int] | type[float], value: Any, at: str, least: int) -> int | float:
    if kind is float and value in _NOT_FINITE:
        return float(value)
    if isinstance(value, bool) or not isinstance(value, int if kind is int else int | float):
        raise ValueError(f"{at} is {_shown(value)} instead of a number")
    if abs(value) > _LARGEST or (kind is int and value < least):
        raise ValueError(f"{at} is {_shown(value)}, outside of {least} to 2^62")
    return kind(value)


def _check_piece(piece: Piece, at: str) -> None:
    """Refuses a piece with rows or bounds outside of its tensor."""
    shape = piece.part.shape
    if len(shape) > _DIMS or prod(shape) > _LARGEST or not piece.is_inside:
        raise ValueError(f"{at} has rows or elements outside of a tensor of shape {_shown(list(shape))}")


@cache
def _hints(kind: type[Any]) -> dict[str, Any]:
    return {field.name: get_type_hints(kind)[field.name] for field in fields(kind)}


def _key(kind: type[Any], key: str, at: str) -> Any:
    if kind is int and not (key.isascii() and key.isdecimal()):
        raise ValueError(f"{at} has the key {_shown(key)} instead of a number")
    return kind(key)


def _checked(value: Any, kind: type[T], at: str) -> T:
    if not isinstance(value, kind):
        raise ValueError(f"{at} is {_shown(value)} instead of {kind.__name__}")
    return value


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
