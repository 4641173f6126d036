"""Reads JSON into typed sections, and writes sections back as JSON.

A *section* is a frozen dataclass whose fields are declared with ``setting(default, rule)``. One reader handles every
section, so a new key takes one line at its declaration and none here.
"""

import dataclasses
import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from engine.config.rules import FrozenMap, Problems, Rule
from engine.config.wording import join_path, kind, show_path, shown_value
from engine.errors import ConfigError

T = TypeVar("T")
_DEPTH = 8
_COMMENT = re.compile(r"^\s*(#|//|/\*)", flags=re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Section(Rule):
    """A JSON object that becomes a dataclass."""

    cls: type[Any]

    def read(self, value: object, at: str, problems: Problems) -> object:
        return None if value is None and self.null else read_section(self.cls, value, at, problems)

    def expected(self) -> str:
        return "an object"

    def dump(self, value: Any) -> Any:
        # a hand-built config may hold anything; the reader will report what is not a section
        return dump_section(value) if isinstance(value, self.cls) else value


@dataclass(frozen=True, slots=True, kw_only=True)
class Sections(Section):
    """A JSON list of objects that become dataclasses."""

    def read(self, value: object, at: str, problems: Problems) -> object:
        if not isinstance(value, (list, tuple)):
            problems.add(at, f"{shown_value(value)} is {kind(value)}; give a list of objects.")
            return None
        return tuple(read_section(self.cls, entry, f"{at}[{i}]", problems) for i, entry in enumerate(value))

    def dump(self, value: Any) -> Any:
        if not isinstance(value, (list, tuple)):
            return value
        return [Section.dump(self, entry) for entry in value]


@dataclass(frozen=True, slots=True, kw_only=True)
class Typed(Section):
    """A section with ``type`` and ``params``, where ``type`` decides which params exist."""

    kinds: Mapping[str, type[Any]]

    def read(self, value: object, at: str, problems: Problems) -> object:
        if not isinstance(value, Mapping):
            return None if value is None and self.null else read_section(self.cls, value, at, problems, ("params",))
        rest = {key: entry for key, entry in value.items() if key != "params"}
        section = read_section(self.cls, rest, at, problems, beside=("params",))
        if problems.touch(f"{at}.type"):
            return section
        params = read_section(self.kinds[section.type], value.get("params", {}), f"{at}.params", problems)
        return dataclasses.replace(section, params=stored(params))

    def dump(self, value: Any) -> Any:
        if not isinstance(value, self.cls) or value.type not in tuple(self.kinds):
            return Section.dump(self, value)
        if not isinstance(value.params, Mapping):
            return {**dump_section(value), "params": value.params}
        kind_of = self.kinds[value.type]
        rules = {f.name: f.metadata["rule"] for f in dataclasses.fields(kind_of)}
        params = {**stored(kind_of(), everything=True), **value.params}
        said = {key: rules[key].dump(entry) if key in rules else entry for key, entry in params.items()}
        return {**dump_section(value), "params": said}


def setting(default: Any, rule: Rule, *, key: str = "", required: bool = False, kept: bool = True) -> Any:
    """Declare a dataclass field that the reader fills.

    ``key`` is its name in JSON, if it differs; ``kept`` makes it part of stored params.
    """
    return dataclasses.field(default=default, metadata={"rule": rule, "key": key, "required": required, "kept": kept})


def settings(cls: type[Any]) -> dict[str, dataclasses.Field[Any]]:
    """Return the fields of a section in order, by their JSON names."""
    return {f.metadata["key"] or f.name: f for f in dataclasses.fields(cls) if "rule" in f.metadata}


def stored(params: Any, everything: bool = False) -> FrozenMap:
    """Return the values of a params section as a read-only mapping."""
    kept = [f.name for f in dataclasses.fields(params) if everything or f.metadata["kept"]]
    return FrozenMap({name: getattr(params, name) for name in kept})


def read_section(cls: type[T], raw: object, at: str, problems: Problems, beside: tuple[str, ...] = ()) -> T:
    """Read a section from a JSON object; a wrong or absent field keeps its default, and problems are noted.

    ``beside`` lists keys that the caller reads, for the suggestions.
    """
    known = settings(cls)
    if not isinstance(raw, Mapping):
        problems.add(at, f"{shown_value(raw)} is {kind(raw)}; give an object with {', '.join((*known, *beside))}.")
        return cls()
    values: dict[str, Any] = {}
    for key, value in raw.items():
        if key not in known:
            problems.unknown(at, key, (*known, *beside))
            continue
        path, rule = join_path(at, key), known[key].metadata["rule"]
        read = rule.read(value, path, problems)
        if read is not None or rule.null:
            values[known[key].name] = read
    for key, entry in known.items():
        if entry.metadata["required"] and key not in raw:
            problems.add(join_path(at, key), f"missing; {entry.metadata['rule'].ask()}.")
    return cls(**values)


def dump_section(section: Any) -> dict[str, Any]:
    """Convert the section to plain JSON values that read back to an equal section."""
    return {key: f.metadata["rule"].dump(getattr(section, f.name)) for key, f in settings(type(section)).items()}


def paths(cls: type[Any], at: str = "") -> Iterator[str]:
    """Yield the dotted paths of all keys of a section, including the params of every type."""
    for key, entry in settings(cls).items():
        here, rule = join_path(at, key), entry.metadata["rule"]
        yield here
        if isinstance(rule, Section):
            yield from paths(rule.cls, here)
        if isinstance(rule, Typed):
            yield f"{here}.params"
            yield from dict.fromkeys(p for each in rule.kinds.values() for p in paths(each, f"{here}.params"))


class _Object(dict[str, Any]):
    """A JSON object that remembers duplicate keys."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        dict.__init__(self, pairs)
        self.remark = ""
        """How the file was read, if not as JSON."""
        self.twice = tuple(name for name, times in Counter(name for name, _ in pairs).items() if times > 1)


def read_json(path: str | os.PathLike[str], problems: Problems) -> Mapping[str, Any]:
    """Read the object in a JSON file and note duplicate keys.

    Raises:
        ConfigError: the file is unreadable or is not JSON.
    """
    name = show_path(os.fsdecode(path))
    try:
        text = Path(os.fsdecode(path)).read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{name}: no such file; give the path of a JSON file, or a dict.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{name}: not readable (it is not UTF-8 text); give the path of a JSON file.") from None
    except OSError as why:
        raise ConfigError(f"{name}: not readable ({why.strerror}); give the path of a JSON file.") from None
    except ValueError:  # a zero byte, or half of a surrogate pair
        raise ConfigError(f"{name}: not the name of a file; give the path of a JSON file, or a dict.") from None
    raw = _parsed(text, name)
    _note_twice(raw, "", problems)
    return raw  # type: ignore[no-any-return]


def remarks(raw: object) -> tuple[str, ...]:
    """How the file of this object was read, if not as JSON."""
    return (raw.remark,) if isinstance(raw, _Object) and raw.remark else ()


def _parsed(text: str, name: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_Object)
    except json.JSONDecodeError as why:
        return _parsed_as_hjson(text, name, why)
    except (RecursionError, ValueError):
        raise ConfigError(f"{name}: nested too deeply, or a number is too long; write a plain config object.") from None


def _parsed_as_hjson(text: str, name: str, why: json.JSONDecodeError) -> Any:
    """The value of a file with comments or without some commas, which DeepSpeed reads too."""
    not_json = f"not JSON at line {why.lineno} column {why.colno} ({why.msg})"
    try:
        import hjson
    except ImportError:
        hint = ", or install hjson, which reads comments" if _COMMENT.search(text) else ""
        raise ConfigError(f"{name}: {not_json}; fix it there{hint}.") from None
    try:
        found = hjson.loads(text, object_pairs_hook=_Object)
    except (RecursionError, ValueError):
        found = None
    if not isinstance(found, _Object) or not text.lstrip().startswith(("{", "#", "/")):
        raise ConfigError(f"{name}: {not_json}; fix it there.") from None
    found.remark = f"{name}: read as Hjson, since it is {not_json}."
    return found


def _note_twice(raw: object, at: str, problems: Problems, depth: int = 0) -> None:
    if depth > _DEPTH:
        return  # no section is nested so deeply; the reader reports the key that holds this as unknown
    if isinstance(raw, list):
        for i, entry in enumerate(raw):
            _note_twice(entry, f"{at}[{i}]", problems, depth + 1)
    if isinstance(raw, _Object):
        for key in raw.twice:
            problems.add(join_path(at, key), "given twice in one object; keep one of them.")
        for key, entry in raw.items():
            _note_twice(entry, join_path(at, key), problems, depth + 1)
