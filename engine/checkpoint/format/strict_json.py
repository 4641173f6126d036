"""JSON from a file that may be damaged or hostile: parsed strictly, read field by field; errors name their field."""

import json
import reprlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from engine.errors import COPY_AGAIN, CheckpointError

_Value = TypeVar("_Value")


def decode_json(data: bytes | bytearray) -> Any:
    """Decodes UTF-8 JSON text and returns its value. Duplicate keys, NaN and infinity are errors.

    Raises:
        ValueError: the text is not valid UTF-8 or JSON, or has a duplicate key, NaN or infinity.
        RecursionError: the value is nested too deeply.
    """
    return json.loads(data.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_refuse_constant)


def parse(data: bytes | bytearray, what: str) -> dict[str, Any]:
    """Decodes the UTF-8 text of a JSON object and returns its dict. ``what`` names the text in errors.

    Raises:
        CheckpointError: the text is no JSON object, or has duplicate keys, NaN or infinity.
    """
    try:
        value = decode_json(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{what} is damaged: {type(error).__name__}, {error}; {COPY_AGAIN}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{what} is damaged: it is not a JSON object; {COPY_AGAIN}")
    return value


def dump(value: Mapping[str, Any]) -> bytes:
    """Encodes a dict as UTF-8 JSON text with sorted keys and without spaces. NaN and infinity raise ValueError."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def as_finite(value: Any) -> Any:
    """Returns ``value``, or a dict such as {"float": "inf"} in place of infinity and NaN, which JSON cannot express."""
    return {"float": repr(value)} if isinstance(value, float) and value - value != 0 else value


def from_finite(value: Any) -> Any:
    """Inverts :func:`as_finite`, also inside lists."""
    if isinstance(value, list):
        return [from_finite(item) for item in value]
    if isinstance(value, dict) and value.keys() == {"float"} and value["float"] in ("inf", "-inf", "nan"):
        return float(value["float"])
    return value


class Fields:
    """Typed access to the fields of a JSON object. A missing or wrong field raises a CheckpointError with its name."""

    def __init__(self, value: Any, what: str) -> None:
        self.what = what
        self._value: Mapping[str, Any] = self._must(value, dict)

    def text(self, name: str) -> str:
        """Returns the string in field ``name``."""
        return self._must(self._value.get(name), str, name)

    def count(self, name: str) -> int:
        """Returns the integer in field ``name``, from 0 to 2^63 - 1."""
        return natural(self._value.get(name), f"{self.what}: {name}")

    def positive(self, name: str) -> float:
        """Returns the finite number in field ``name``, which must be above 0."""
        value = self._value.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise CheckpointError(
                f"{self.what}: {name} is {_named(value)}, not a number above 0: the file is damaged; {COPY_AGAIN}"
            )
        return float(value)

    def object(self, name: str) -> dict[str, Any]:
        """Returns the JSON object in field ``name``."""
        return self._must(self._value.get(name), dict, name)

    def list(self, name: str) -> list[Any]:
        """Returns the JSON array in field ``name``."""
        return self._must(self._value.get(name), list, name)

    def any(self, name: str) -> Any:
        """Returns the value in field ``name``, of any type; None if it is absent."""
        return self._value.get(name)

    def each(self, name: str, read: Callable[[Any, str], _Value]) -> dict[str, _Value]:
        """Returns the JSON object in field ``name``, with each value converted by ``read(value, place)``.

        ``place``: text that names the value in errors.
        """
        return {key: read(value, f"{self.what}: {name}[{key!r}]") for key, value in self.object(name).items()}

    def _must(self, value: Any, kind: type[_Value], name: str = "") -> _Value:
        if not isinstance(value, kind):
            where = f"{self.what}: {name}" if name else self.what
            raise CheckpointError(
                f"{where} is {_named(value)}, not a {kind.__name__}: the file is damaged; {COPY_AGAIN}"
            )
        return value


def natural(value: Any, what: str) -> int:
    """Returns ``value`` if it is an integer from 0 to 2^63 - 1; raises CheckpointError, naming ``what``, otherwise."""
    if type(value) is not int or not 0 <= value < 2**63:
        raise CheckpointError(
            f"{what} is {_named(value)}, not a whole number of 0 or more: the file is damaged; {COPY_AGAIN}"
        )
    return value


def naturals(value: Any, what: str) -> tuple[int, ...]:
    """Returns ``value``, a list of integers from 0 to 2^63 - 1, as a tuple. Otherwise raises a CheckpointError
    that names ``what``.
    """
    if not isinstance(value, list):
        raise CheckpointError(f"{what} is {_named(value)}, not a list: the file is damaged; {COPY_AGAIN}")
    return tuple(natural(item, what) for item in value)


def _named(value: Any) -> str:
    # a value of a pickle may contain one list so often that its whole text fits no memory
    text = repr(value) if isinstance(value, str | int | float | None) else reprlib.repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key occurs twice in its JSON")
    return found


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"its JSON has the number {name}")
