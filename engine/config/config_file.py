"""Readers of configuration files: JSON (with comments, or as Hjson), TOML and YAML; and of KEY=VALUE words."""

import json
import os
import re
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path, PurePath
from typing import Any, ClassVar

from engine.config.rules import Problems
from engine.config.wording import join_path, kind, show_path, shown_value
from engine.errors import ConfigError

_DEPTH = 8
_TEXT = r'"[^"\\]*(?:\\.[^"\\]*)*"'
_COMMENT = re.compile(_TEXT + r"|(?://|#)[^\n]*|/\*.*?\*/", flags=re.DOTALL)
"""A comment, or a quoted text, in which no comment begins."""
_LAST_COMMA = re.compile(_TEXT + r"|,(?=\s*[}\]])", flags=re.DOTALL)


class FileObject(dict[str, Any]):
    """JSON object read from a file, with a list of the keys that occur twice in it."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        dict.__init__(self, pairs)
        self.remark = ""
        """Format that the file was read in, if it is not the format of its name."""
        self.twice = tuple(name for name, times in Counter(name for name, _ in pairs).items() if times > 1)


def read_config_file(path: str | os.PathLike[str], problems: Problems) -> Mapping[str, Any]:
    """Reads a file as JSON, TOML or YAML, by its suffix, and returns its value; adds a problem for each duplicate key.

    Raises:
        ConfigError: the file is unreadable or malformed.
    """
    name = show_path(os.fsdecode(path))
    text = _text(os.fsdecode(path), name)
    suffix = PurePath(os.fsdecode(path)).suffix.lower()
    if suffix == ".toml":
        raw = _parsed_toml(text, name)
    elif suffix in (".yaml", ".yml"):
        raw = _parsed_yaml(text, name)
    else:
        raw = _parsed_json(text, name)
    note_twice(raw, "", problems)
    return raw  # type: ignore[no-any-return]


def remarks(raw: object) -> tuple[str, ...]:
    """Returns a tuple with a note if ``raw`` was read as Hjson, from a file that is not valid JSON; otherwise ()."""
    return (raw.remark,) if isinstance(raw, FileObject) and raw.remark else ()


def _text(path: str, name: str) -> str:
    give = "give the path of a JSON, TOML or YAML file"
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{name}: this file does not exist; {give}, or a dict.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{name}: this file is not UTF-8 text; {give}.") from None
    except OSError as why:
        raise ConfigError(f"{name}: this file cannot be read ({why.strerror}); {give}.") from None
    except ValueError:  # a zero byte, or half of a surrogate pair
        raise ConfigError(f"{name}: this is not the name of a file; {give}, or a dict.") from None


def _too_deep(name: str) -> ConfigError:
    return ConfigError(
        f"{name}: the configuration is nested too deeply, or a number in it is too long; write a plain JSON object."
    )


# ------------------------------------------------------------------------------------------------ JSON


def _parsed_json(text: str, name: str) -> Any:
    """Returns the value of JSON text, in which comments and a comma after a last entry are allowed."""
    try:
        return _strict_json(text, name)
    except json.JSONDecodeError:  # most files are plain JSON, and a search for comments takes longer than reading
        plain = _COMMENT.sub(_blanked, text)
    try:
        return _strict_json(plain, name)
    except json.JSONDecodeError as why:
        first = why
    try:
        return _strict_json(_LAST_COMMA.sub(_blanked, plain), name)
    except json.JSONDecodeError:
        return _parsed_hjson(text, name, first)


def _strict_json(text: str, name: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=FileObject)
    except json.JSONDecodeError:
        raise
    except (RecursionError, ValueError):
        raise _too_deep(name) from None


def _blanked(found: re.Match[str]) -> str:
    """Returns blanks in place of a match that is not quoted text, so that every character keeps its line and column."""
    return found[0] if found[0][0] == '"' else re.sub(r"[^\n]", " ", found[0])


def _parsed_hjson(text: str, name: str, why: json.JSONDecodeError) -> Any:
    """Returns the value of a file without some commas or quotes, which DeepSpeed reads too if hjson is installed."""
    not_json = f"not JSON at line {why.lineno} column {why.colno} ({why.msg})"
    try:
        import hjson
    except ImportError:
        raise ConfigError(f"{name}: {not_json}; fix it there.") from None
    try:
        found = hjson.loads(text, object_pairs_hook=FileObject)
    except (RecursionError, ValueError):
        found = None
    if not isinstance(found, FileObject) or not text.lstrip().startswith(("{", "#", "/")):
        raise ConfigError(f"{name}: {not_json}; fix it there.") from None
    found.remark = f"{name}: read as Hjson, since it is {not_json}."
    return found


def note_twice(raw: object, at: str, problems: Problems, depth: int = 0) -> None:
    """Adds a problem for each key that a file has twice in one object; ``raw`` is the value read from it.

    ``at``: JSON path of ``raw``. ``depth``: number of enclosing objects and lists.
    """
    if depth > _DEPTH:
        return  # no section is nested so deeply; the reader reports the key above as unknown
    if isinstance(raw, list):
        for i, entry in enumerate(raw):
            note_twice(entry, f"{at}[{i}]", problems, depth + 1)
    if isinstance(raw, FileObject):
        for key in raw.twice:
            problems.add(join_path(at, key), "this key is given twice in one object; keep one of them.")
        for key, entry in raw.items():
            if isinstance(entry, (list, FileObject)):
                note_twice(entry, join_path(at, key), problems, depth + 1)


# ------------------------------------------------------------------------------------------------ TOML, YAML


def _parsed_toml(text: str, name: str) -> Any:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as why:  # duplicate keys, too
        raise ConfigError(f"{name}: not TOML ({why}); fix it there.") from None
    except (RecursionError, ValueError):
        raise _too_deep(name) from None


def _parsed_yaml(text: str, name: str) -> Any:
    try:
        import yaml
    except ImportError:
        raise ConfigError(
            f"{name}: YAML is read by PyYAML, which is not installed; install it (pip install pyyaml), or write JSON "
            "or TOML, which need nothing."
        ) from None
    try:
        return yaml.load(text, Loader=_yaml_loader())
    except yaml.MarkedYAMLError as why:
        mark = why.problem_mark
        at = f" at line {mark.line + 1} column {mark.column + 1}" if mark else ""
        raise ConfigError(f"{name}: not YAML{at} ({why.problem}); fix it there.") from None
    except yaml.YAMLError:
        raise ConfigError(f"{name}: not YAML (it contains characters that YAML refuses); fix it there.") from None
    except (RecursionError, ValueError):
        raise _too_deep(name) from None


def _yaml_loader() -> Any:
    """Returns a loader with YAML 1.2's scalars, which are JSON's: PyYAML's default reads ``3e-4`` as text and ``off``
    as false."""
    from yaml import MarkedYAMLError, SafeLoader
    from yaml.nodes import MappingNode, ScalarNode

    class Yaml12(SafeLoader):  # type: ignore[misc]
        yaml_implicit_resolvers: ClassVar[dict[str, list[tuple[str, re.Pattern[str]]]]] = {}

        def mapping(self, node: MappingNode) -> FileObject:
            for key, _ in node.value:
                if not isinstance(key, ScalarNode):
                    raise MarkedYAMLError(problem="a key is a list or an object", problem_mark=key.start_mark)
            twice = Counter(key.value for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge")
            self.flatten_mapping(node)  # merges anchors; the node's own keys win
            build = self.construct_object
            made = FileObject([(build(key, True), build(entry, True)) for key, entry in node.value])
            made.twice = tuple(key for key, times in twice.items() if times > 1)
            return made

        def integer(self, node: ScalarNode) -> int:
            return int(node.value, 16 if "x" in node.value else 10)  # 010 is 10, which YAML 1.1 reads as octal

    for scalar, pattern, first in (
        ("null", r"~|null|Null|NULL|", "~nN\0"),
        ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
        ("int", r"[-+]?\d+|0x[0-9a-fA-F]+", "-+0123456789"),
        ("float", r"[-+]?(\.\d+|\d+\.?\d*)([eE][-+]?\d+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", "-+.0123456789"),
        ("merge", r"<<", "<"),
    ):
        letters = ["" if letter == "\0" else letter for letter in first]
        Yaml12.add_implicit_resolver(f"tag:yaml.org,2002:{scalar}", re.compile(rf"(?:{pattern})\Z"), letters)
    Yaml12.add_constructor("tag:yaml.org,2002:map", Yaml12.mapping)
    Yaml12.add_constructor("tag:yaml.org,2002:int", Yaml12.integer)
    return Yaml12


OVERRIDES_HELP = "keys that replace keys of the configuration, such as optimizer.params.lr=3e-4"

_OVERRIDE = re.compile(r"[A-Za-z_]\w*(\.\w+)*=", flags=re.ASCII)


def is_override(word: str) -> bool:
    """Returns True if a command-line word has the form KEY=VALUE with a dotted key, such as
    ``optimizer.params.lr=3e-4``.
    """
    return bool(_OVERRIDE.match(word))


def overridden(raw: Mapping[str, Any], overrides: Sequence[str], problems: Problems) -> Mapping[str, Any]:
    """Returns a copy of the configuration ``raw`` with every KEY=VALUE word in ``overrides`` applied, in order.

    A value is JSON, or else text: ``3e-4``, ``["*.bias"]``, ``1f1b``. A number in a key is the index of a list:
    ``optimizer.groups.0.lr=1e-5``. Missing objects on the path are created. Mistakes become problems.
    """
    if not overrides:
        return raw
    changed: dict[str, Any] = dict(raw)
    for word in overrides:
        if not isinstance(word, str) or not is_override(word):
            problems.add(
                "", f"{shown_value(word)} is not an override; give KEY=VALUE, such as optimizer.params.lr=3e-4."
            )
            continue
        path, _, text = word.partition("=")
        value = _value(text)
        note_twice(value, path, problems)
        _put(changed, path.split("."), value, path, problems)
    return changed


def _put(holder: dict[str, Any], keys: Sequence[str], value: Any, path: str, problems: Problems) -> None:
    """Puts the value below ``holder``; objects on the path are copied, since others share them."""
    place: dict[str, Any] | list[Any] = holder
    for depth, (key, after) in enumerate(pairwise(keys), 1):
        inner = _inner(place, key)
        if inner is None:
            inner = {}
        if not isinstance(inner, (Mapping, list)):
            above = ".".join(keys[:depth])
            problems.add(path, f"{above} is {kind(inner)}, which has no {after}; give {above} itself.")
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
            problems.add(path, f"{key} is not an index of a list of {len(place)}; give a number below {len(place)}.")
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
