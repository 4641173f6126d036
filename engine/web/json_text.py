"""JSON text of messages: objects with unique keys, and floats that are not finite as text."""

import json
import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

from engine.checkpoint.format.strict_json import decode_json


def dump_json(value: Any) -> bytes:
    """Returns as JSON bytes a ``value`` of dataclasses, enums, mappings, sequences and JSON values.

    Floats that are not finite become strings.
    """
    return json.dumps(_to_json(value), separators=(",", ":"), allow_nan=False).encode()


def parse_json(data: bytes | bytearray) -> dict[str, Any]:
    """Returns the JSON object in ``data`` as a dict.

    Raises:
        ValueError: ``data`` is no JSON object, or one of its objects has a key twice.
    """
    try:
        value = decode_json(data)
    except RecursionError:
        raise ValueError("its JSON is nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError("its JSON is not an object")
    return value


def _to_json(value: Any) -> Any:
    """Returns a message as JSON values; a float that is not finite becomes text."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: _to_json(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): _to_json(entry) for key, entry in value.items()}
    if isinstance(value, tuple | list):
        return [_to_json(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
