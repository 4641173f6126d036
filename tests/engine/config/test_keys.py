"""Generated over every key of the config: misspellings, wrong types, the JSON Schema, random damage."""

import json
import random
from collections.abc import Iterable, Iterator
from copy import deepcopy
from dataclasses import replace
from typing import Any

import jsonschema
import pytest

from engine.config import Config, load_config
from engine.config.deepspeed.keys import KEYS
from engine.config.json_schema import schema
from engine.config.reader import Section, Sections, Typed, settings
from engine.config.rules import Rule
from engine.errors import ConfigError
from tests.engine.config.test_config import DESIGN

Place = tuple[str, str, Rule, dict[str, Any]]  # section path, key, rule, a config that reaches the section


def _nest(path: str, body: Any) -> dict[str, Any]:
    for part in reversed(path.split(".")):
        body = {part.removesuffix("[0]"): [body] if part.endswith("[0]") else body}
    return dict(body)


def _places(cls: type[Any], at: str = "", around: dict[str, Any] | None = None) -> Iterator[Place]:
    for key, entry in settings(cls).items():
        rule, here = entry.metadata["rule"], f"{at}.{key}" if at else key
        yield at, key, rule, around or {}
        match rule:
            case Typed():
                yield from _places(rule.cls, here)
                for name, kind in rule.kinds.items():
                    around_params = {"type": name, "params": {"adam_w_mode": False} if name == "Adam" else {}}
                    yield from _places(kind, f"{here}.params", _nest(here, around_params))
            case Sections():
                yield from _places(rule.cls, f"{here}[0]")
            case Section():
                yield from _places(rule.cls, here)


PLACES = tuple(_places(Config))
NAMED = [f"{at}.{key} {around}" for at, key, _, around in PLACES]


def _with(place: Place, key: str, value: object) -> dict[str, Any]:
    """A config in which the place's section holds this key, beside what reaches the section."""
    at, _, _, around = place
    if not at:
        return {key: value}
    if not around:
        return _nest(at, {key: value})
    raw = deepcopy(around)
    section = raw
    for part in at.split("."):
        section = section[part]
    section[key] = value
    return raw


def _message(raw: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(raw)
    return str(caught.value)


def without_a_letter(place: Place, letters: Iterable[int]) -> None:
    """A key that lacks one of these letters is refused by a sentence with the right key."""
    at, key, _, _ = place
    level = {name for section, name, *_ in PLACES if section == at}
    right = f"{at}.{key}" if at else key
    for dropped in letters if len(key) > 1 else ():
        wrong = key[:dropped] + key[dropped + 1 :]
        if wrong in level:
            continue
        path = f"{at}.{wrong}" if at else wrong
        message = _message(_with(place, wrong, None))
        line = next(line for line in message.split("\n") if line.startswith(f"{path}: unknown key"))
        meant = line.partition("Did you mean ")[2].rstrip("?").split(" or ")
        assert right in meant, line


@pytest.mark.parametrize("place", PLACES, ids=NAMED)
def test_misspelt_key_names_the_right_one(place: Place) -> None:
    without_a_letter(place, {0, len(place[1]) // 2})


@pytest.mark.long
def test_so_does_one_without_any_letter() -> None:
    for place in PLACES:
        without_a_letter(place, range(len(place[1])))


@pytest.mark.parametrize("place", PLACES, ids=NAMED)
def test_wrong_type_is_named_with_its_path(place: Place) -> None:
    at, key, rule, _ = place
    right = f"{at}.{key}" if at else key
    refused = 0
    for value in ("", True, -1, 2.5, [7], {"zz": 7}, float("nan"), float("inf"), None, "4x", object()):
        try:
            load_config(_with(place, key, value))
        except ConfigError as error:
            refused += right in str(error)
    assert refused >= 4, (right, rule)


def test_every_deepspeed_key_survives_a_misspelling() -> None:
    for path in KEYS:
        at, _, key = path.rpartition(".")
        wrong = key[:3] + key[4:]
        if len(key) < 6 or f"{at}.{wrong}".lstrip(".") in KEYS:
            continue
        if at == "scheduler.params":
            continue  # needs a type; covered by the test of every key of ours
        assert "Did you mean" in _message(_nest(at, {wrong: None}) if at else {wrong: None})


VALIDATOR = jsonschema.Draft202012Validator(schema())


def test_schema_takes_what_loads() -> None:
    jsonschema.Draft202012Validator.check_schema(schema())
    adam = {"optimizer": {"type": "adam", "params": {"adam_w_mode": False}}}
    for raw in ({}, DESIGN, {"optimizer": None}, {"scheduler": {"type": "WarmupLR"}}, adam):
        VALIDATOR.validate(raw)
        VALIDATOR.validate(load_config(raw).to_json())


@pytest.mark.parametrize("place", PLACES, ids=NAMED)
def test_schema_refuses_unknown_keys_and_describes_known_ones(place: Place) -> None:
    if not place[3] or place[3].get("optimizer", {}).get("type") != "AdamW":
        assert not VALIDATOR.is_valid(_with(place, "no_such_key", 1))
    if not place[0]:
        assert schema()["properties"][place[1]]["description"]


def test_schema_and_reader_agree_on_damage() -> None:
    """What the schema takes loads, unless a rule between keys refuses it."""
    for raw in _damaged(200):
        if VALIDATOR.is_valid(raw):
            try:
                load_config(raw)
            except ConfigError as error:
                assert "train_batch_size" in str(error) or "parallel: " in str(error) or "while" in str(error), raw


def test_random_damage_gives_a_config_or_a_config_error() -> None:
    for raw in _damaged(300):
        for world_size in (None, 8):
            try:
                config = load_config(raw, world_size)
            except ConfigError as error:
                assert str(error)
            else:
                assert load_config(config.to_json(), world_size) == replace(config, notes=())


def _damaged(count: int) -> Iterator[dict[str, Any]]:
    dice = random.Random(7)
    junk: tuple[Any, ...] = (
        None,
        True,
        False,
        0,
        1,
        -3,
        7,
        2.5,
        1e400,
        float("nan"),
        "",
        "auto",
        "x.csv",
        [],
        [1],
        ["a"],
        {},
        {"a": "b"},
    )
    for _ in range(count):
        raw = json.loads(json.dumps(DESIGN))
        for _ in range(dice.randint(1, 3)):
            section = raw
            while isinstance(inner := section.get(dice.choice(list(section) or [""])), dict) and dice.random() < 0.7:
                section = inner
            key = dice.choice([*section, *KEYS, "params", "groups"]).rpartition(".")[2]
            if dice.random() < 0.3:
                section.pop(key, None)
            else:
                section[key] = dice.choice(junk)
        yield raw
