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
    """Typed reader of the fields of a JSON object; ``at`` is the object's path in the request, for errors.

    A method raises RequestRefusedError with status 422 if a field is invalid, or if it is missing and has no
    ``default``.
    """

    def __init__(self, values: Mapping[str, Any], at: str = "") -> None:
        self.values, self._at = values, at

    @classmethod
    def parsed(cls, data: bytes) -> "BodyFields":
        """Parses the body of a request.

        Raises:
            RequestRefusedError: 400, the body is no JSON object.
        """
        try:
            return cls(parse_json(data))
        except ValueError as error:
            raise RequestRefusedError(f"the body is no JSON object: {str(error)[:120]}; send one.") from None

    def refuse(self, name: str, rule: str) -> RequestRefusedError:
        """Returns the error for the field ``name``, without raising it.

        The error's sentence ends with ``rule``, such as "give true or false".
        """
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
        """Returns the string in the field ``name``, of at most ``most`` characters; ``default`` if it is missing."""
        rule = f"give a text of at most {most} characters"
        value = self._get(name, default, rule)
        if value is not default and (not isinstance(value, str) or len(value) > most or not _is_text(value)):
            raise self.refuse(name, rule)
        return value

    def integer(self, name: str, default: Any = _NO_DEFAULT, low: int = 0, high: int = _LARGEST) -> Any:
        """Returns the integer in the field ``name``, from ``low`` to ``high``; ``default`` if it is missing."""
        rule = f"give an integer from {low} to {high}"
        value = self._get(name, default, rule)
        if value is not default:
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or value != value or not low <= value <= high or int(value) != value:
                raise self.refuse(name, rule)
            return int(value)
        return value

    def real(self, name: str, default: Any = _NO_DEFAULT, low: float = 0.0, high: float = math.inf) -> Any:
        """Returns the finite number in the field ``name``, from ``low`` to ``high``; ``default`` if it is missing."""
        rule = f"give a finite number from {low:g} to {high:g}"
        value = self._get(name, default, rule)
        if value is not default:
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or abs(value) > _LARGEST or not low <= value <= high:
                raise self.refuse(name, rule)
            return float(value)
        return value

    def flag(self, name: str, default: Any = False) -> bool:
        """Returns the boolean in the field ``name``; ``default`` if it is missing."""
        value = self._get(name, default, "give true or false")
        if not isinstance(value, bool):
            raise self.refuse(name, "give true or false")
        return value

    def mapping(self, name: str, default: Any = _NO_DEFAULT) -> "BodyFields":
        """Returns a reader of the JSON object in the field ``name``, or of ``default`` if it is missing."""
        value = self._get(name, default, "give an object")
        if not isinstance(value, Mapping):
            raise self.refuse(name, "give an object")
        return BodyFields(value, f"{self._at}{name}.")

    def items(self, name: str, default: Any = _NO_DEFAULT, most: int = 1 << 24) -> list[Any]:
        """Returns the list in the field ``name``, of at most ``most`` entries; ``default`` if it is missing."""
        rule = f"give a list of at most {most:,} entries"
        value = self._get(name, default, rule)
        if not isinstance(value, list) or len(value) > most:
            raise self.refuse(name, rule)
        return value


def _is_text(value: str) -> bool:
    """Returns False for half of a surrogate pair, which JSON can name and UTF-8 cannot."""
    return not any("\ud800" <= one <= "\udfff" for one in value)
