"""Values and keys that no configuration expects: JSON of every kind and size, and what only a dict holds. Pure data."""

import json
import random
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True, slots=True)
class Odd:
    """A value that plain ``json.dumps`` does not write: its JSON text, and what that text stands for."""

    text: str
    value: Callable[[], object]


def _nested(depth: int, opening: str, closing: str) -> Odd:
    def build() -> object:
        value: object = []
        for _ in range(depth):
            value = [value] if opening == "[" else {"a": value}
        return value

    return Odd(opening * depth + "[]" + closing * depth, build)


DEEP = tuple(
    _nested(depth, *ends)
    for depth in (5, 60, 300, 900, 940, 960, 970, 975, 980, 985, 990, 1000, 5000, 20_000)
    for ends in (("[", "]"), ('{"a":', "}"))
)
TEXTS = (
    "", " ", "auto", "4", "1e-3", "true", "none", "x.csv", "a\nb", "a\x00b", "\x1b[31mred\x1b[0m", "\x7f\x85",
    "\u202eabc", "\u2028", "\ud800", "日本語", "größe", "\U0001f600", "\ufeff", "'\"\\", "%s {} {0}", "x" * 61,
    "é" * 5000, "x" * 300_000, "\n" * 5000,
)  # fmt: skip
NUMBERS: tuple[Any, ...] = (
    0, 1, -1, 2, 3, 7, 2**31, 2**53 + 1, 2**62, 2**63 - 1, 2**63, -(2**63), 10**400, 0.5, -0.0, 1.0, 2.5, 64.0,
    1e308, -1e308, 5e-324, Odd("1e400", lambda: float("inf")), Odd("NaN", lambda: float("nan")),
    Odd("-Infinity", lambda: float("-inf")), Odd("-0", lambda: 0), Odd("1" + "0" * 5000, lambda: 10**5000),
)  # fmt: skip
OBJECTS: tuple[Any, ...] = (
    [], [1], ["a"], [0.9], [0.9, 0.99], [None], [[]], [{}], [True, False], list(range(20_000)), {}, {"a": "b"}, {"": 1},
    {"type": "AdamW"}, {"enabled": True}, {"params": {}}, {"params": None}, {"device": "cpu"}, {"a": {"b": [{}]}},
    {str(number): number for number in range(3000)},
)  # fmt: skip
FOREIGN: tuple[Any, ...] = (
    b"bytes", {1, 2}, Decimal("0.5"), Fraction(1, 3), Fraction(10**5000), 1j, Path("folder"), (), (0.9, 0.99), {1: 2},
    {None: 1}, {(1, 2): 3}, MappingProxyType({"enabled": True}), object, range(3), ...,
)  # fmt: skip
"""What a dict may hold and JSON may not."""
NAMES = (
    "zz", "lorem_ipsum", "", " ", ".", "parallel.tensor", "zero_optimization.overlap_comm", "compile.enabled", "a b",
    "key\nwith: a line", "\x00", "\x1b[2J", "\u202eseed", "\ud800", "ключ", "日本語", "__class__", "params", "seed ",
    "0", '"', "x" * 70, "y" * 300_000, "optimizer[0]",
)  # fmt: skip
"""Keys that no section has."""


def any_value(dice: random.Random) -> Any:
    group = dice.choice((TEXTS, NUMBERS, OBJECTS, (None, True, False), DEEP, FOREIGN))
    value = dice.choice(group)
    return deepcopy(value) if isinstance(value, (list, dict)) else value


def holds_foreign(value: object) -> bool:
    return any(value is each or (type(value) is type(each) and value == each) for each in FOREIGN)


def shown(value: object) -> str | float:
    """So much of a value as every message about it must show: a number, or the plain beginning of the JSON text."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and not abs(value) > 2**63:
        return value
    if isinstance(value, (dict, Odd)) or holds_foreign(value):
        return ""
    text = json.dumps(value, ensure_ascii=False)[:40]
    odd = [index for index, letter in enumerate(text) if not " " <= letter <= "~" or letter == "\\"]
    return text[: odd[0]] if odd else text
