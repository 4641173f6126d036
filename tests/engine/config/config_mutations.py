"""Damaged configurations, each made from a valid one by its number alone. Pure data.

    valid config -> edits of its tree (keys and values) -> JSON text -> edits of the text -> bytes of a file
                                                        \\-> dict

A mutant says what was done to it and what a refusal must name, so that a test can hold the answer against it.
"""

import json
import random
import reprlib
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Literal

from engine.config import Config
from engine.config.deepspeed.keys import KEYS
from engine.config.reader import paths
from tests.engine.config.odd_values import NAMES, Odd, any_value, holds_foreign, shown
from tests.engine.config.valid_configs import VALID, Tree

Dice = random.Random
Form = Literal["dict", "file"]


@dataclass(frozen=True, slots=True)
class Edit:
    """One edit of a tree, and what an answer owes to it."""

    told: str
    path: str = ""
    """JSON path that a refusal must name; empty: none."""
    given: str | float = ""
    """Text or number that a refusal must show."""
    refused: bool = False
    """Whether no reading of the rules takes it, unless a later edit undoes it."""
    form: Form | None = None
    """The only form in which it can be given."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """A damaged configuration, as it is given."""

    source: Tree | bytes
    world_size: Any
    edits: tuple[Edit, ...]


# ------------------------------------------------------------------------------------------------ places

KNOWN = (*paths(Config), *KEYS)
SECTIONS = frozenset(path.rpartition(".")[0] for path in KNOWN)
WORDS = tuple(dict.fromkeys(path.rpartition(".")[2] for path in KNOWN))


@dataclass(frozen=True, slots=True)
class Place:
    """``holder[key]``, and the JSON path by which a message names it."""

    holder: Any
    key: str | int
    path: str


def places(node: object, at: str = "") -> Iterator[Place]:
    """Every key of every object, and every entry of every list; a list answers for entries that are no objects."""
    if isinstance(node, dict):
        for key, value in node.items():
            path = f"{at}.{key}" if at else str(key)
            yield Place(node, key, path)
            if path != "parallel.tensor_plan":
                yield from places(value, path)
    if isinstance(node, list):
        for index, value in enumerate(node):
            path = f"{at}[{index}]" if isinstance(value, dict) else at
            yield Place(node, index, path)
            yield from places(value, path)


def sections(tree: Tree) -> list[tuple[str, Tree]]:
    """Objects that take only keys that are known, by path."""
    found = [("", tree)] + [(p.path, p.holder[p.key]) for p in places(tree)]
    return [(path, node) for path, node in found if isinstance(node, dict) and path.replace("[0]", "") in SECTIONS]


def is_known(at: str, key: str) -> bool:
    at = at.replace("[0]", "")
    return (f"{at}.{key}" if at else key) in (*KNOWN, "$schema", "optimizer.groups")


# ------------------------------------------------------------------------------------------------ edits of the tree


class Twice(Tree):
    """An object whose text gives one key a second time, with this value."""

    again: tuple[str, object]


def misspell(dice: Dice, tree: Tree) -> Edit:
    found = [(at, node, key) for at, node in sections(tree) for key in node if isinstance(key, str) and key]
    if not found:
        return Edit("nothing")
    at, section, key = dice.choice(found)
    place = dice.randrange(len(key))
    wrong = dice.choice((
        key[:place] + key[place + 1 :], key[:place] + key[place] + key[place:], key[:place] + "x" + key[place + 1 :],
        key[:place] + key[place + 1 : place + 2] + key[place] + key[place + 2 :], key.upper(), key.replace("_", "-"),
        key + "s", key.replace("_", ""), key + " ", key[:place] + "é" + key[place:],
    ))  # fmt: skip
    if is_known(at, wrong) or wrong in section:
        return Edit("nothing")
    section[wrong] = section.pop(key)
    plain = wrong.isascii() and " " not in wrong and wrong
    return Edit(f"{at}: {key} is called {wrong!r}", f"{at}.{wrong}".lstrip(".") if plain else at, refused=True)


def invent(dice: Dice, tree: Tree) -> Edit:
    at, section = dice.choice(sections(tree))
    key = dice.choice(NAMES)
    if is_known(at, key) or key in section:
        return Edit("nothing")
    section[key] = value = any_value(dice)
    return Edit(f"{at}: {key[:40]!r} is new", at, refused=True, form="dict" if holds_foreign(value) else None)


def move_in(dice: Dice, tree: Tree) -> Edit:
    """A key of another section."""
    at, section = dice.choice(sections(tree))
    key = dice.choice(WORDS)
    if is_known(at, key) or key in section:
        return Edit("nothing")
    section[key] = dice.choice((None, 1, "auto", True, {}))
    return Edit(f"{at}: {key} of another section", f"{at}.{key}".lstrip("."), refused=True)


def remove(dice: Dice, tree: Tree) -> Edit:
    found = list(places(tree))
    if not found:
        return Edit("nothing")
    place = dice.choice(found)
    del place.holder[place.key]
    return Edit(f"{place.path} is gone")


def put(dice: Dice, tree: Tree) -> Edit:
    """Another value for a key, or for an entry of a list."""
    found = list(places(tree))
    return _set(dice.choice(found), any_value(dice)) if found else Edit("nothing")


def nudge(dice: Dice, tree: Tree) -> Edit:
    """A value not far from what stands there."""
    found = [p for p in places(tree) if isinstance(p.holder[p.key], (int, float, str))]
    if not found:
        return Edit("nothing")
    place = dice.choice(found)
    old = place.holder[place.key]
    if isinstance(old, bool):
        return _set(place, dice.choice((not old, not old, not old, int(old), str(old).lower())))
    if isinstance(old, str):
        return _set(place, dice.choice((old.upper(), old.lower(), old[1:], f" {old}", f"{old}x", f"./{old}", [old])))
    half = old * 0.5 if abs(old) < 1e9 else 0.5
    return _set(place, dice.choice((old * 2, old * 2, old + 1, old // 2, half, -old, repr(old), [old], {"value": old})))


def _set(place: Place, value: Any) -> Edit:
    place.holder[place.key] = value
    foreign = holds_foreign(value)
    told = f"{place.path}: {reprlib.repr(value)}"
    # Another type has other params, which are named instead; of an empty section there is nothing to name.
    if place.path.endswith(".type") or value == {}:
        return Edit(told, form="dict" if foreign else None)
    return Edit(told, place.path, shown(value), form="dict" if foreign else None)


def repeat(dice: Dice, tree: Tree) -> Edit:
    """A key given twice in the text of one object."""
    found = [p for p in places(tree) if isinstance(p.holder[p.key], dict) and p.holder[p.key]]
    if not found:
        return Edit("nothing")
    place = dice.choice(found)
    section, path = Twice(place.holder[place.key]), place.path
    key, value = dice.choice(list(section)), any_value(dice)
    section.again = (key, None if holds_foreign(value) else value)
    place.holder[place.key] = section
    named = f"{path}.{key}" if path != "parallel.tensor_plan" else path
    return Edit(f"{path}: {key} twice", named, "given twice", refused=True, form="file")


def swap(dice: Dice, tree: Tree) -> Edit:
    if not tree:
        return Edit("nothing")
    one, other = (dice.choice(list(tree)) for _ in range(2))
    tree[one], tree[other] = tree[other], tree[one]
    return Edit(f"{one} and {other} are swapped")


def odd_key(dice: Dice, tree: Tree) -> Edit:
    """A key that is no text, which only a dict can have."""
    at, section = dice.choice(sections(tree))
    key: Any = dice.choice((1, None, True, 2.5, (1, 2), float("nan"), b"seed"))
    section[key] = 1
    return Edit(f"{at}: key {key!r}", at, refused=True, form="dict")


TREE_EDITS = (misspell, invent, move_in, remove, put, put, put, put, nudge, nudge, nudge, repeat, swap, odd_key)

# ------------------------------------------------------------------------------------------------ the text


def plain(node: Any) -> Any:
    """The tree as a dict that a caller may pass."""
    if isinstance(node, Odd):
        return node.value()
    if isinstance(node, dict):
        return {key: plain(value) for key, value in node.items()}
    return [plain(value) for value in node] if isinstance(node, list) else node


def written(node: Any, escaped: bool) -> str:
    """The tree as JSON text."""
    if isinstance(node, Odd):
        return node.text
    if isinstance(node, dict):
        pairs = [*node.items(), *([node.again] if isinstance(node, Twice) else [])]
        return "{" + ", ".join(f"{json.dumps(key)}: {written(value, escaped)}" for key, value in pairs) + "}"
    if isinstance(node, list):
        return "[" + ", ".join(written(value, escaped) for value in node) + "]"
    return json.dumps(node, ensure_ascii=escaped)


def damage(dice: Dice, text: bytes) -> tuple[bytes, Edit]:
    """The bytes of a file, changed somewhere."""
    at, more = dice.randrange(len(text)), dice.choice((b"\xff", b"\xc3(", b"\xed\xa0\x80", b"\x80"))
    changed, told, refused = dice.choice((
        (text[:at], "cut off", True),
        (b"", "empty", True),
        (text[:at] + more + text[at:], "no UTF-8", True),
        (b"\xef\xbb\xbf" * 2 + text, "two byte-order marks", True),
        (text[:at] + b"\xef\xbb\xbf" + text[at:], "a byte-order mark", False),
        (text.decode(errors="replace").encode("utf-16"), "UTF-16", True),
        (text.decode(errors="replace").encode("utf-32"), "UTF-32", True),
        (text + text, "twice", True),
        (b"[" + text + b"]", "in a list", True),
        (json.dumps(text.decode(errors="replace")).encode(), "as text", True),
        (dice.choice((b"null", b"3", b"true", b"NaN", b"[]", b'"a"', b"{")), "something else", True),
        (text.replace(b"}", b",}"), "commas at ends", False),
        (text + b"// done", "a comment", False),
        (text.replace(b'"', b"'"), "single quotes", False),
        (text[:at] + text[at + 1 :], "a byte less", False),
        (text[:at] + text[at : at + 1] + text[at:], "a byte twice", False),
        (text[:at] + bytes([dice.randrange(256)]) + text[at + 1 :], "another byte", False),
        (text.replace(b" ", b"\r\n\t"), "other white space", False),
    ))  # fmt: skip
    return changed, Edit(f"the file: {told} at {at}", refused=refused, form="file")


# ------------------------------------------------------------------------------------------------ mutants

WORLDS: tuple[Any, ...] = (
    1,
    2,
    4,
    8,
    8,
    8,
    8,
    8,
    8,
    8,
    16,
    12,
    64,
    3,
    7,
    0,
    -1,
    True,
    "4",
    2.0,
    2**31,
    2**63,
    10**400,
    10**5000,
    [8],
)


def mutant(number: int) -> Mutant:
    """The mutant of this number: always the same."""
    dice = random.Random(number)
    tree = deepcopy(dice.choice(list(VALID.values())))
    count = dice.choice((0, 1, 1, 1, 1, 1, 1, 1, 2, 3, 6))
    edits = [dice.choice(TREE_EDITS)(dice, tree) for _ in range(count)]
    world_size = dice.choice(WORLDS) if dice.random() < 0.4 else None
    forms = {edit.form for edit in edits} - {None}
    as_file = forms == {"file"} or (not forms and (not edits or dice.random() < 0.5))
    if not as_file:
        return Mutant(plain(tree), world_size, tuple(edit for edit in edits if edit.form != "file"))
    try:
        text = written(tree, dice.random() < 0.5).encode()
    except UnicodeEncodeError:  # half of a pair: only its escape can be in a file
        text = written(tree, escaped=True).encode()
    if dice.random() < 0.1:
        text = b"\xef\xbb\xbf" + text
    if not edits or dice.random() < 0.1:
        text, edit = damage(dice, text)
        edits = [edit]  # the text may now break before an earlier edit is read
    return Mutant(text, world_size, tuple(edits))
