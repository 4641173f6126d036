"""Fields of a JSON body, read one by one: a wrong one is one sentence; unknown ones are ignored, as newer clients send
them.
"""

import math
from collections.abc import Mapping
from typing import Any

from engine.serving.bookkeeping.entry import RequestRefusedError
from engine.web.json_text import parse_json

_LARGEST = 1 << 62
_SHOWN = 60
_NO_DEFAULT: Any = object()


class BodyFields:
    """Fields of a JSON object; ``at`` is its place in the body.

    Every method raises RequestRefusedError, status 422, if the field is missing without a default or has another type.
    """

    def __init__(self, values: Mapping[str, Any], at: str = "") -> None:
        self.values, self._at = values, at

    @classmethod
    def parsed(cls, data: bytes) -> "BodyFields":
        """Reads a body.

        Raises:
            RequestRefusedError: 400, it is no JSON object.
        """
        try:
            return cls(parse_json(data))
        except ValueError as error:
            raise RequestRefusedError(f"the body is no JSON object: {str(error)[:120]}; send one.") from None

    def refuse(self, name: str, rule: str) -> RequestRefusedError:
        """Returns the error of a field that breaks a rule."""
        given = repr(self.values.get(name))
        shown = given if len(given) <= _SHOWN else given[:_SHOWN] + "..."
        what = f"is {shown}" if name in self.values else "is missing"
        return RequestRefusedError(f"{self._at}{name} {what}; {rule}.", 422)

    def _get(self, name: str, default: Any, rule: str) -> Any:
        value = self.values.get(name)
        if value is None:
            if default is _NO_DEFAULT:
                raise self.refuse(name, rule)
            return default
        return value

    def text(self, name: str, default: Any = _NO_DEFAULT, most: int = 512) -> Any:
        """Returns a text of at most ``most`` characters."""
        rule = f"give a text of at most {most} characters"
        value = self._get(name, default, rule)
        if value is not default and (not isinstance(value, str) or len(value) > most or not _is_text(value)):
            raise self.refuse(name, rule)
        return value

    def integer(self, name: str, default: Any = _NO_DEFAULT, low: int = 0, high: int = _LARGEST) -> Any:
        """Returns an integer between two bounds."""
        rule = f"give an integer from {low} to {high}"
        value = self._get(name, default, rule)
        if value is not default:
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or value != value or not low <= value <= high or int(value) != value:
                raise self.refuse(name, rule)
            return int(value)
        return value

    def real(self, name: str, default: Any = _NO_DEFAULT, low: float = 0.0, high: float = math.inf) -> Any:
        """Returns a finite number between two bounds."""
        rule = f"give a finite number from {low:g} to {high:g}"
        value = self._get(name, default, rule)
        if value is not default:
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or abs(value) > _LARGEST or not low <= value <= high:
                raise self.refuse(name, rule)
            return float(value)
        return value

    def flag(self, name: str, default: Any = False) -> bool:
        """Returns true or false."""
        value = self._get(name, default, "give true or false")
        if not isinstance(value, bool):
            raise self.refuse(name, "give true or false")
        return value

    def mapping(self, name: str, default: Any = _NO_DEFAULT) -> "BodyFields":
        """Returns the fields of an object."""
        value = self._get(name, default, "give an object")
        if not isinstance(value, Mapping):
            raise self.refuse(name, "give an object")
        return BodyFields(value, f"{self._at}{name}.")

    def items(self, name: str, default: Any = _NO_DEFAULT, most: int = 1 << 24) -> list[Any]:
        """Returns a list of at most ``most`` entries."""
        rule = f"give a list of at most {most:,} entries"
        value = self._get(name, default, rule)
        if not isinstance(value, list) or len(value) > most:
            raise self.refuse(name, rule)
        return value


def _is_text(value: str) -> bool:
    """Returns False for half of a surrogate pair, which JSON can name and UTF-8 cannot."""
    return not any("\ud800" <= one <= "\udfff" for one in value)
