"""Single keys of a configuration, given on a command line: ``optimizer.params.lr=3e-4``."""

import json
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from engine.config.config_file import FileObject, note_twice
from engine.config.rules import Problems
from engine.config.wording import kind, shown_value

OVERRIDES_HELP = "keys in place of those of the configuration, such as optimizer.params.lr=3e-4"

_OVERRIDE = re.compile(r"[A-Za-z_]\w*(\.\w+)*=", flags=re.ASCII)


def is_override(word: str) -> bool:
    """Return whether a word of a command line is KEY=VALUE with a dotted key."""
    return bool(_OVERRIDE.match(word))


def overridden(raw: Mapping[str, Any], overrides: Sequence[str], problems: Problems) -> Mapping[str, Any]:
    """The configuration with every KEY=VALUE put in, the last one of a key wins; ``raw`` itself is not changed.

    A value is JSON, or text where it is not: ``true``, ``3e-4``, ``["*.bias"]``, ``1f1b``. A key that names a place in
    a list is its number: ``optimizer.groups.0.lr=1e-5``. Objects on the way are made. What is wrong is noted by the
    key, as if the file had said it.
    """
    if not overrides:
        return raw
    changed: dict[str, Any] = dict(raw)
    for word in overrides:
        if not isinstance(word, str) or not is_override(word):
            problems.add("", f"{shown_value(word)} is no override; give KEY=VALUE, such as optimizer.params.lr=3e-4.")
            continue
        path, _, text = word.partition("=")
        value = _value(text)
        note_twice(value, path, problems)
        _put(changed, path.split("."), value, path, problems)
    return changed


def _put(holder: dict[str, Any], keys: Sequence[str], value: Any, path: str, problems: Problems) -> None:
    """Put the value below ``holder``; objects on the way are copied, since others hold them too."""
    place: dict[str, Any] | list[Any] = holder
    for depth, (key, after) in enumerate(pairwise(keys), 1):
        inner = _inner(place, key)
        if inner is None:
            inner = {}
        if not isinstance(inner, (Mapping, list)):
            above = ".".join(keys[:depth])
            problems.add(path, f"{above} is {kind(inner)}, which holds no {after}; give {above} itself.")
            return
        copied = list(inner) if isinstance(inner, list) else dict(inner)
        if not _store(place, key, copied, path, problems):
            return
        place = copied
    _store(place, keys[-1], value, path, problems)


def _inner(place: Any, key: str) -> Any:
    if isinstance(place, list):
        return place[int(key)] if key.isdecimal() and int(key) < len(place) else None
    return place.get(key)


def _store(place: Any, key: str, value: Any, path: str, problems: Problems) -> bool:
    if isinstance(place, list):
        if not key.isdecimal() or int(key) >= len(place):
            problems.add(path, f"{key} is no place in a list of {len(place)}; give a number below {len(place)}.")
            return False
        place[int(key)] = value
        return True
    place[key] = value
    return True


def _value(text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=FileObject)
    except (ValueError, RecursionError):
        return text
