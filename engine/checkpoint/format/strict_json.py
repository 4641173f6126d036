"""JSON of a file that may be damaged or hostile: parsed strictly, read field by field, refused by name."""

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from engine.errors import CheckpointError

_Value = TypeVar("_Value")


def parse(data: bytes | bytearray, what: str) -> dict[str, Any]:
    """A JSON object without duplicate keys.

    Raises:
        CheckpointError: it is none.
    """
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{what} is damaged: {type(error).__name__}, {error}.") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{what} is damaged: not a JSON object.")
    return value


def dump(value: Mapping[str, Any]) -> bytes:
    """The JSON text of what we write: sorted keys, no spaces, NaN refused."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


class Fields:
    """Reads the fields of a JSON object; whatever is not as it has to be is a CheckpointError that names it."""

    def __init__(self, value: Any, what: str) -> None:
        self.what = what
        self._value: Mapping[str, Any] = self._must(value, dict)

    def text(self, name: str) -> str:
        """A string."""
        return self._must(self._value.get(name), str, name)

    def count(self, name: str) -> int:
        """A whole number of 0 or more, in 64 bits."""
        return natural(self._value.get(name), f"{self.what}: {name}")

    def positive(self, name: str) -> float:
        """A finite number above 0."""
        value = self._value.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise CheckpointError(f"{self.what}: {name} is {_named(value)} where a number above 0 belongs.")
        return float(value)

    def object(self, name: str) -> dict[str, Any]:
        """A JSON object."""
        return self._must(self._value.get(name), dict, name)

    def list(self, name: str) -> list[Any]:
        """A JSON array."""
        return self._must(self._value.get(name), list, name)

    def any(self, name: str) -> Any:
        """Whatever is there, None where nothing is."""
        return self._value.get(name)

    def each(self, name: str, read: Callable[[Any, str], _Value]) -> dict[str, _Value]:
        """A JSON object, its values read one by one."""
        return {key: read(value, f"{self.what}: {name}[{key!r}]") for key, value in self.object(name).items()}

    def _must(self, value: Any, kind: type[_Value], name: str = "") -> _Value:
        if not isinstance(value, kind):
            where = f"{self.what}: {name}" if name else self.what
            raise CheckpointError(f"{where} is {_named(value)} where {kind.__name__} belongs; the file is damaged.")
        return value


def natural(value: Any, what: str) -> int:
    """A whole number of 0 or more, in 64 bits."""
    if type(value) is not int or not 0 <= value < 2**63:
        raise CheckpointError(
            f"{what} is {_named(value)} where a whole number of 0 or more belongs; the file is damaged."
        )
    return value


def naturals(value: Any, what: str) -> tuple[int, ...]:
    """A list of such numbers."""
    if not isinstance(value, list):
        raise CheckpointError(f"{what} is {_named(value)} where a list belongs; the file is damaged.")
    return tuple(natural(item, what) for item in value)


def _named(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key appears twice")
    return found


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")
