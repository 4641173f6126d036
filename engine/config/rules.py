"""Rules for the JSON values of configuration keys, and :class:`Problems`, which collects mistakes.

A rule is data: it converts a value, describes the accepted values in an error, and generates the JSON Schema.
"""

import difflib
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from numbers import Integral
from numbers import Real as RealNumber
from typing import Any

from engine.config.other_engines import other_engines_word
from engine.config.wording import join_path, kind, shown_value
from engine.errors import ConfigError
from engine.parallel.activation_checkpointing.operators import OPERATOR_KINDS

_CLOSE = 0.6  # difflib's default cutoff; a dropped letter of a two-letter key scores 0.67
_LONG = 100  # longer keys resemble no known one
_SEARCHES = 50  # limit of unknown keys that are looked up: a file of another kind may contain thousands
_LINES = 100  # limit of problems in one message
_TORCH_NAME = re.compile(r"\w+(\.\w+){1,2}")
_HOME = 0.15  # a similar key of the same section wins, unless a key elsewhere is more similar by this much


class FrozenMap(Mapping[str, Any]):
    """Read-only mapping that can be hashed, pickled and compared with a dict."""

    __slots__ = ("_items",)

    def __init__(self, items: Mapping[str, Any] | None = None) -> None:
        self._items = dict(items or {})

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(frozenset(self._items.items()))

    def __repr__(self) -> str:
        return f"FrozenMap({self._items!r})"


class Problems:
    """Collector of all mistakes in one config, so that one error reports them together."""

    def __init__(self, source: str, ours: Sequence[str] = (), theirs: Sequence[str] = ()) -> None:
        """Takes the dotted paths of Trine's and DeepSpeed's keys, ``ours`` and ``theirs``, for "did you mean"."""
        self.source = source
        self._ours = ours
        self._theirs = theirs
        self._found: list[tuple[str, str]] = []
        self._searches = 0
        self.passed: list[str] | None = None
        """Collects unknown top-level keys that resemble no known one; None: they are problems too."""

    def add(self, at: str, sentence: str) -> None:
        """Adds a mistake about the value at JSON path ``at``; ``sentence`` describes the mistake and gives a remedy."""
        self._found.append((at, sentence))

    def unknown(self, at: str, key: object, level: Sequence[str]) -> None:
        """Adds a mistake about the unknown key ``key`` in the section at JSON path ``at``.

        It suggests similar names from the valid keys ``level``.
        """
        path = f"{at}.{key}" if at else str(key)
        if path not in self._ours and (elsewhere := other_engines_word(path)):
            self.add(join_path(at, key), f"unknown key; {elsewhere}.")
            return
        self._searches += 1
        searched = isinstance(key, str) and self._searches <= _SEARCHES
        near = _nearest(at, str(key), level, (self._ours, self._theirs)) if searched else []
        if not near and not at and self.passed is not None:
            self.passed.append(str(key))
        elif near:
            self.add(join_path(at, key), f"unknown key. Did you mean {' or '.join(near)}?")
        else:
            self.add(join_path(at, key), f"unknown key; remove it or use one of {', '.join(level)}.")

    def touch(self, *prefixes: str) -> bool:
        """Returns True if any mistake so far is at or below one of the JSON paths ``prefixes``."""
        return any(at == p or at.startswith(p + ".") for at, _ in self._found for p in prefixes)

    def raise_if_any(self) -> None:
        """Raises one ConfigError that lists all mistakes, if there are any."""
        lines = [f"{at or self.source}: {sentence}" for at, sentence in dict.fromkeys(self._found)]
        if len(lines) == 1:
            raise ConfigError(lines[0])
        if lines:
            more = [f"{self.source}: {len(lines) - _LINES} more; fix these first."] if len(lines) > _LINES else []
            raise ConfigError("\n".join([f"{len(lines)} problems in {self.source}:", *lines[:_LINES], *more]))


class RefusedError(ValueError):
    """Error that a rule raises about a value. Its message is a clause, such as "is below 0"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Base class of rules that check and convert the JSON value of a configuration key.

    ``remedy``: advice in an error; if empty, "give" and the text that the method ``expected`` returns. ``null``: True
    to accept null.
    """

    remedy: str = ""
    null: bool = False

    def accept(self, value: object) -> object:
        """Returns the JSON value ``value`` as the configuration stores it.

        Raises:
            RefusedError: this rule does not accept the value.
        """
        raise NotImplementedError

    def expected(self) -> str:
        """Returns a description of the accepted values for an error, such as "a positive number"."""
        raise NotImplementedError

    def ask(self) -> str:
        """Returns the advice for an error, such as "give a number"."""
        return self.remedy or f"give {self.expected()}"

    def read(self, value: object, at: str, problems: Problems) -> object:
        """Returns the JSON value ``value`` as the configuration stores it.

        For a wrong value it adds a problem at JSON path ``at`` and returns None.
        """
        if value is None and self.null:
            return None
        try:
            return self.accept(value)
        except RefusedError as why:
            reason = "leaves the value to the Hugging Face Trainer" if value == "auto" else why
            problems.add(at, f"{shown_value(value)} {reason}; {self.ask()}.")
            return None

    def dump(self, value: Any) -> Any:
        """Returns ``value``, a result of :meth:`accept`, converted back to a JSON value."""
        if isinstance(value, Mapping):
            return dict(value)
        return list(value) if isinstance(value, tuple) else value


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag(Rule):
    """Rule for a JSON value true or false."""

    def accept(self, value: object) -> object:
        if not isinstance(value, bool):
            raise RefusedError(f"is {kind(value)}")
        return value

    def expected(self) -> str:
        return "true or false"


@dataclass(frozen=True, slots=True, kw_only=True)
class Real(Rule):
    """Rule for a finite number. The bounds ``low`` and ``high`` are inclusive, ``above`` and ``below`` exclusive."""

    low: float | None = None
    above: float | None = None
    below: float | None = None
    high: float | None = None

    def accept(self, value: object) -> object:
        return float(self._within(_number(value)))

    def _within(self, number: float) -> float:
        if self.low is not None and number < self.low:
            raise RefusedError(f"is below {self.low:g}")
        if self.above is not None and number <= self.above:
            raise RefusedError(f"is not above {self.above:g}")
        if self.below is not None and number >= self.below:
            raise RefusedError(f"is not below {self.below:g}")
        if self.high is not None and number > self.high:
            raise RefusedError(f"is above {self.high:g}")
        return number

    def expected(self) -> str:
        return "a number" + self._bounds()

    def _bounds(self) -> str:
        named = (
            ("of at least", self.low),
            ("above", self.above),
            ("below", self.below),
            ("of at most", self.high),
        )
        said = [f"{word} {bound:g}" for word, bound in named if bound is not None]
        return " " + " and ".join(said) if said else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Int(Real):
    """Rule for a whole number. Also accepts 4e6, as in DeepSpeed's files."""

    def accept(self, value: object) -> object:
        number = _number(value)
        if number != int(number):
            raise RefusedError("is not a whole number")
        if abs(number) >= 2**63:
            raise RefusedError("does not fit in 64 bits")
        return self._within(int(number))

    def expected(self) -> str:
        return "a whole number" + self._bounds()


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice(Rule):
    """Rule for a value that must be one of the words or numbers in ``options``.

    ``fold`` ignores letter case; ``also`` maps further spellings to options.
    """

    options: tuple[str | int, ...]
    noun: str
    fold: bool = False
    also: Mapping[str, str] = FrozenMap()

    def accept(self, value: object) -> object:
        if isinstance(value, bool) or not isinstance(value, (str, RealNumber)):
            raise RefusedError(f"is {kind(value)}")
        given = self.also.get(value, value) if isinstance(value, str) else value
        for option in self.options:
            if given == option or (self.fold and isinstance(given, str) and given.lower() == str(option).lower()):
                return option
        raise RefusedError(f"is not {self.noun}")

    def expected(self) -> str:
        words = [shown_value(option) for option in self.options]
        return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Text(Rule):
    """Rule for nonempty text or a path object. If ``ends`` is given, the value must end with one of its entries."""

    noun: str = "text"
    ends: tuple[str, ...] = ()

    def accept(self, value: object) -> object:
        words = os.fspath(value) if isinstance(value, os.PathLike) else value
        if not isinstance(words, str):
            raise RefusedError(f"is {kind(words)}")
        if not words or (self.ends and not words.endswith(self.ends)):
            raise RefusedError(f"is not {self.noun}" if words else "is empty")
        return words

    def expected(self) -> str:
        return f"{self.noun} in quotes"


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorName(Text):
    """Rule for a category of torch operators, such as "matmul", or the name of one operator, such as "aten.mm" or
    "aten.mm.default".
    """

    def accept(self, value: object) -> object:
        word = Text.accept(self, value)
        if word in OPERATOR_KINDS or _TORCH_NAME.fullmatch(str(word)):
            return word
        near = difflib.get_close_matches(str(word).lower(), OPERATOR_KINDS, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"kinds are {', '.join(OPERATOR_KINDS)}"
        raise RefusedError(f"is neither a kind of operator nor of the form aten.mm ({hint})")


@dataclass(frozen=True, slots=True, kw_only=True)
class ListOf(Rule):
    """Rule for a list with entries that the rule ``each`` accepts.

    ``length``: required number of entries, or None. ``least``: smallest allowed number of entries.
    """

    each: Rule
    noun: str
    length: int | None = None
    least: int = 0

    def accept(self, value: object) -> object:
        if not isinstance(value, (list, tuple)):
            raise RefusedError(f"is {kind(value)}")
        if self.length is not None and len(value) != self.length:
            raise RefusedError(f"has {len(value)} entries")
        if len(value) < self.least:
            raise RefusedError(f"has fewer entries than {self.least}" if value else "is an empty list")
        given = [entry for entry in value if entry is not None or not self.each.null]
        for entry in given:
            self._check(entry)
        return tuple(None if entry is None and self.each.null else self.each.accept(entry) for entry in value)

    def _check(self, entry: object) -> None:
        try:
            self.each.accept(entry)
        except RefusedError as why:
            raise RefusedError(f"contains {shown_value(entry)}, which {why}") from None

    def expected(self) -> str:
        return self.noun


@dataclass(frozen=True, slots=True, kw_only=True)
class TextMap(Rule):
    """Rule for an object with text values."""

    def accept(self, value: object) -> object:
        if not isinstance(value, Mapping):
            raise RefusedError(f"is {kind(value)}")
        for key, entry in value.items():
            if not isinstance(key, str) or not isinstance(entry, str) or not entry:
                raise RefusedError(f"contains {shown_value(entry)} under {shown_value(key)}, which is not text")
        return FrozenMap(value)

    def expected(self) -> str:
        return "an object with text as its values"


@dataclass(frozen=True, slots=True, kw_only=True)
class AnyOf(Rule):
    """Rule for values that any of ``rules`` accepts. The first such rule converts the value.

    If none accepts it, the last rule's error is reported.
    """

    rules: tuple[Rule, ...]
    section: type[Any] | None = None
    """Dataclass of an object that is accepted too: the reader spreads its keys over several keys."""

    def accept(self, value: object) -> object:
        for rule in self.rules[:-1]:
            try:
                return rule.accept(value)
            except RefusedError:
                continue
        return self.rules[-1].accept(value)

    def expected(self) -> str:
        return ", or ".join(rule.expected() for rule in self.rules)


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, RealNumber):
        raise RefusedError(f"is {kind(value)}")
    try:
        number: float = int(value) if isinstance(value, Integral) else float(value)
        if not math.isfinite(number):
            raise RefusedError("is not a finite number")
    except OverflowError:
        raise RefusedError("is too large") from None
    return number


def _nearest(at: str, key: str, level: Sequence[str], known: tuple[Sequence[str], Sequence[str]]) -> list[str]:
    """Returns the paths of the known keys (ours, theirs) most like ``key``: in its section first, then anywhere."""
    ours, theirs = known
    here = re.sub(r"\[\d+\]", "", at)
    nested = f"{here}.{key}" if here else key
    if "." in key and nested in (*ours, *theirs):
        return [nested]  # a path written as one key
    if nested in ours and key not in level:
        return []  # params of another type: the caller lists the params of this type
    siblings = [each for each in theirs if _parent_and_word(each)[0] == here]
    # If the exact name exists elsewhere, only a nearly identical key of this section can win.
    ending = f".{key}"
    least = 1 - _HOME if any(each.endswith(ending) or each == key for each in (*ours, *theirs)) else _CLOSE
    home = _likeness(key, (*(join_path(at, name) for name in level), *siblings), least)
    elsewhere = _likeness(key, [each for each in (*ours, *theirs) if _parent_and_word(each)[0] != here], least)
    best_home, best_elsewhere = max(home.values(), default=0.0), max(elsewhere.values(), default=0.0)
    at_home = best_home >= _CLOSE and best_home >= best_elsewhere - _HOME
    scores, best = (home, best_home) if at_home else (elsewhere, best_elsewhere)
    nearest = [each for each, score in scores.items() if score == best and best >= _CLOSE]
    return [each for each in nearest if each not in theirs][:3] or nearest[:3]


@lru_cache(maxsize=4096)
def _parent_and_word(path: str) -> tuple[str, str]:
    """Returns the section of a path and its last word in lower case; cached, since each unknown key asks for all
    paths."""
    parent, _, word = path.rpartition(".")
    return parent, word.lower()


def _likeness(given: str, known: Iterable[str], least: float) -> dict[str, float]:
    """Returns the most similar known paths with the similarity (at least ``least``) of their last word and ``given``.

    A path that is less similar than an earlier one may be left out.
    """
    if len(given) > _LONG:
        return {}
    matcher = difflib.SequenceMatcher(None, b=given.lower().replace("-", "_"))
    length = len(given)
    shortest, longest = length * least / (2 - least), length * (2 - least) / least
    scores: dict[str, float] = {}
    of_word: dict[str, float] = {}
    for path in known:
        word = _parent_and_word(path)[1]
        score = of_word.get(word)
        if score is None:
            score = 0.0
            # bounds by length and by letters avoid most of the slow comparisons
            if shortest <= len(word) <= longest:
                matcher.set_seq1(word)
                score = matcher.ratio() if matcher.quick_ratio() >= least else 0.0
            of_word[word] = score
        if score >= least:
            scores[path] = least = score
            shortest, longest = length * least / (2 - least), length * (2 - least) / least
    return scores
