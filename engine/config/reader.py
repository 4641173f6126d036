"""Reader of JSON values into typed sections, and writer of sections as JSON.

A *section* is a frozen dataclass with fields declared by ``setting(default, rule)``. One reader handles every section,
so a new key takes one line at its declaration and none here.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

from engine.config.rules import FrozenMap, Problems, Rule
from engine.config.wording import join_path, kind, shown_value

T = TypeVar("T")


def _now(*keys: str) -> Callable[[object], Mapping[str, object]]:
    return lambda value: dict.fromkeys(keys, value)


_LARGE = 2**53
"""Bound of the numbers that are doubled here; the rule of the present key refuses larger ones, and NaN."""


def _one_timeout(value: object) -> Mapping[str, object]:
    """Returns the keys that make the watchdog wait ``value`` seconds: it waits half of the time of communication."""
    if value is None:
        return {"watchdog.enabled": False}
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _LARGE:
        return {"communication.timeout_seconds": math.ceil(2 * value)}
    return {} if value == "auto" else {"communication.timeout_seconds": value}


OLD_KEYS: Mapping[str, Callable[[object], Mapping[str, object]]] = MappingProxyType({
    "parallel.verify_plan": _now("parallel.prove_plan", "parallel.check_replicas"),
    "watchdog.max_skipped_steps": _now("max_skipped_steps"),
    "watchdog.timeout_seconds": _one_timeout,
})  # fmt: skip
"""Renamed keys of earlier versions, each with a function from its value to the present keys and values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section(Rule):
    """Rule for a JSON object that is read into a dataclass."""

    cls: type[Any]

    def read(self, value: object, at: str, problems: Problems) -> object:
        return None if value is None and self.null else read_section(self.cls, value, at, problems)

    def expected(self) -> str:
        return "an object"

    def dump(self, value: Any) -> Any:
        # a hand-built config may contain anything; the reader reports values that are not sections
        return dump_section(value) if isinstance(value, self.cls) else value


@dataclass(frozen=True, slots=True, kw_only=True)
class Sections(Section):
    """Rule for a JSON list of objects that are read into dataclasses."""

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
    """Rule for a section with ``type`` and ``params``; ``type`` selects the dataclass of the params."""

    kinds: Mapping[str, type[Any]]
    several: type[Any] | None = None
    """Dataclass of list entries before the last one, with a key ``match``; None if lists are not accepted."""

    def read(self, value: object, at: str, problems: Problems) -> object:
        if self.several is not None and isinstance(value, (list, tuple)):
            return self._read_list(value, at, problems)
        return None if value is None and self.null else self._read_one(self.cls, value, at, problems)

    def _read_list(self, entries: Sequence[object], at: str, problems: Problems) -> Any:
        """Returns the section of the last entry, with the sections of the earlier entries as ``before``."""
        if not entries:
            problems.add(
                at, "[] is an empty list; give at least one entry, which takes the parameters that no pattern matches."
            )
            return None
        before = tuple(
            self._read_one(self.several or self.cls, entry, f"{at}[{index}]", problems)
            for index, entry in enumerate(entries[:-1])
        )
        rest, last = entries[-1], f"{at}[{len(before)}]"
        if isinstance(rest, Mapping) and "match" in rest:
            problems.add(
                f"{last}.match", "given in the last entry, which takes all other parameters; add an entry after it."
            )
            rest = {key: entry for key, entry in rest.items() if key != "match"}
        return dataclasses.replace(self._read_one(self.cls, rest, last, problems), before=before)

    def _read_one(self, cls: type[Any], value: object, at: str, problems: Problems) -> Any:
        if not isinstance(value, Mapping):
            return read_section(cls, value, at, problems, ("params",))
        rest = {key: entry for key, entry in value.items() if key != "params"}
        section = read_section(cls, rest, at, problems, beside=("params",))
        if problems.touch(f"{at}.type"):
            return section
        params = read_section(self.kinds[section.type], value.get("params", {}), f"{at}.params", problems)
        return dataclasses.replace(section, params=stored(params))

    def dump(self, value: Any) -> Any:
        before = getattr(value, "before", ())
        if not before or not isinstance(before, tuple):
            return self._dump_one(value)
        return [*map(self._dump_one, before), self._dump_one(value)]

    def _dump_one(self, value: Any) -> Any:
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
    """Returns a dataclass field for a configuration key; ``rule`` checks and converts the key's JSON value.

    ``key``: name in JSON; empty: the field's name. ``required``: True if a missing key is a mistake. ``kept``: False if
    :func:`stored` leaves the field out.
    """
    return dataclasses.field(default=default, metadata={"rule": rule, "key": key, "required": required, "kept": kept})


def settings(cls: type[Any]) -> dict[str, dataclasses.Field[Any]]:
    """Returns the fields of the section dataclass ``cls`` by their JSON names, in order."""
    return {f.metadata["key"] or f.name: f for f in dataclasses.fields(cls) if "rule" in f.metadata}


def stored(params: Any, everything: bool = False) -> FrozenMap:
    """Returns the params of an optimizer or scheduler as a read-only mapping by field name.

    Fields declared with ``kept`` False are left out, unless ``everything`` is True.
    """
    kept = [f.name for f in dataclasses.fields(params) if everything or f.metadata["kept"]]
    return FrozenMap({name: getattr(params, name) for name in kept})


def read_section(cls: type[T], raw: object, at: str, problems: Problems, beside: tuple[str, ...] = ()) -> T:
    """Converts the JSON object ``raw``, at JSON path ``at``, to the section dataclass ``cls``.

    A wrong or missing key gets its default, and mistakes are added to ``problems``. ``beside``: valid keys that the
    caller has removed from ``raw`` to read them itself; errors may suggest them.
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
    """Returns a section dataclass as a dict of JSON values, the inverse of ``read_section``."""
    return {key: f.metadata["rule"].dump(getattr(section, f.name)) for key, f in settings(type(section)).items()}


def paths(cls: type[Any], at: str = "") -> Iterator[str]:
    """Yields the dotted paths of all keys of a section, including the params of every optimizer or scheduler type."""
    for key, entry in settings(cls).items():
        here, rule = join_path(at, key), entry.metadata["rule"]
        yield here
        if isinstance(rule, Section):
            yield from paths(rule.cls, here)
        if isinstance(rule, Typed):
            yield f"{here}.params"
            yield from dict.fromkeys(p for each in rule.kinds.values() for p in paths(each, f"{here}.params"))


def renamed(raw: Mapping[str, Any], problems: Problems) -> tuple[Mapping[str, Any], list[str]]:
    """Renames keys of earlier versions in a configuration. Returns the new configuration, and a note for each renamed
    key.

    A renamed key that contradicts another key adds a problem.
    """
    present, notes = dict(raw), list[str]()
    for old, meaning in OLD_KEYS.items():
        section, _, word = old.partition(".")
        body = present.get(section)
        if isinstance(body, Mapping) and word in body:
            present[section] = {key: value for key, value in body.items() if key != word}
            for key, value in (keys := meaning(body[word])).items():
                move(present, key, value, old, problems)
            sets = " and ".join(f"{key} {shown_value(value)}" for key, value in keys.items())
            notes.append(f"{old}: a key of earlier versions; it sets {sets or 'nothing more'}.")
    _spread_context(present, problems)
    return present, notes


def _spread_context(present: dict[str, Any], problems: Problems) -> None:
    """Spreads an object under ``parallel.context`` over the keys of its size and its method."""
    parallel = present.get("parallel")
    given = parallel.get("context") if isinstance(parallel, Mapping) else None
    if not isinstance(parallel, Mapping) or not isinstance(given, Mapping):
        return
    for key in (key for key in given if key not in ("size", "method")):
        problems.unknown("parallel.context", key, ("size", "method"))
    if "size" not in given:
        problems.add("parallel.context.size", "missing; give the number of context ranks.")
    present["parallel"] = {**parallel, "context": given.get("size", 1)}
    if "method" in given:
        move(present, "parallel.context_method", given["method"], "parallel.context.method", problems)


def move(raw: dict[str, Any], target: str, value: object, origin: str, problems: Problems) -> None:
    """Sets the dotted key ``target`` in ``raw`` to ``value``, which the user wrote under the key ``origin``.

    If ``target`` already has a different value, that value stays, and a problem about ``origin`` is added.
    """
    if (given := put_at(raw, target, value)) is not value and given != value:  # NaN differs from itself
        rival = f"which is given as {shown_value(given)}"
        problems.add(origin, f"sets {target} to {shown_value(value)}, {rival}; remove one of them.")


def put_at(raw: dict[str, Any], path: str, value: object) -> object:
    """Sets the dotted key ``path`` in ``raw`` to ``value`` if the key has no value; returns the key's value afterwards.

    Changes ``raw`` itself, but replaces nested objects on the path by changed copies.
    """
    *parents, leaf = path.split(".")
    for parent in parents:
        section = raw.get(parent, {})
        if not isinstance(section, Mapping):
            return value  # the reader reports a section that is not an object
        raw[parent] = dict(section)
        raw = raw[parent]
    return raw.setdefault(leaf, value)
