"""Whatever a configuration holds, the answer is a Config that reads back, or one ConfigError in plain words.

By default 1,000 mutants are tried; ``-m long`` tries 10,000 others and holds what a call costs to its limit.
"""

import json
import math
import random
import re
import time
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from engine.config import Config, load_config
from engine.config.optim_sections import OptimizerConfig
from engine.errors import ConfigError
from tests.engine.config.config_mutations import Edit, Mutant, mutant, plain
from tests.engine.config.odd_values import DEEP, any_value
from tests.engine.config.valid_configs import FULL, VALID

P99_SECONDS = 5e-3
"""Processor time that 99 of 100 calls stay below."""
LINES = 100
"""Problems that one message lists."""


class Answers:
    """Calls ``load_config``, holds every answer against the contract, and keeps what each call cost."""

    def __init__(self, folder: Path) -> None:
        self.wrong: list[str] = []
        self.accepted = 0
        self.seconds: list[float] = []
        self._path = folder / "run.json"

    def ask(self, number: int) -> None:
        """Try the mutant of this number."""
        made = mutant(number)
        source: Any = made.source
        if isinstance(source, bytes):
            self._path.write_bytes(source)
            source = self._path
        found = self._wrong_in_answer(source, made)
        self.wrong += [f"mutant {number} ({'; '.join(edit.told for edit in made.edits)}): {line}" for line in found]

    def _wrong_in_answer(self, source: Any, made: Mutant) -> list[str]:
        answer, seconds = _timed(source, made)
        if seconds > P99_SECONDS:  # another process on this core makes a call slow, but hardly the same one twice
            seconds = min(seconds, _timed(source, made)[1])
        self.seconds.append(seconds)
        if isinstance(answer, Exception):
            return list(wrong_in_refusal(answer, made))
        self.accepted += 1
        return list(wrong_in_config(answer, made))

    def p99(self) -> float:
        """Seconds of processor time."""
        return sorted(self.seconds)[len(self.seconds) * 99 // 100]


def _timed(source: Any, made: Mutant) -> tuple[Config | Exception, float]:
    """The configuration or the error, and the seconds of processor time."""
    started = time.thread_time()
    answer: Config | Exception
    try:
        answer = load_config(source, made.world_size)
    except Exception as error:
        answer = error
    return answer, time.thread_time() - started


def wrong_in_config(config: Config, made: Mutant) -> Iterator[str]:
    """What the contract forbids about an accepted mutant."""
    if made.edits and made.edits[-1].refused:
        yield "accepted"
    text = json.dumps(config.to_json(), allow_nan=False)
    for world_size in (None, made.world_size):
        if load_config(json.loads(text), world_size) != replace(config, notes=()):
            yield f"does not read back with world size {world_size}"


def wrong_in_refusal(error: Exception, made: Mutant) -> Iterator[str]:
    """What the contract forbids about a refused one."""
    if type(error) is not ConfigError:
        yield f"{type(error).__name__}: {error!s:.200}"
        return
    first, *sentences = str(error).split("\n")
    if sentences:
        stated = int(first.partition(" problems in ")[0])
        more = f": {stated - LINES} more; fix these first."
        if len(sentences) != stated and not (len(sentences) == LINES + 1 and sentences[-1].endswith(more)):
            yield f"{len(sentences)} lines under {first:.200}"
    for line in sentences or [first]:
        if not (line.isprintable() and len(line) < 1500 and ": " in line and line[-1] in ".?"):
            yield f"not a sentence: {line[:300]!r}"
    if len(made.edits) == 1 and made.world_size in (None, 8) and not names(str(error), made.edits[0]):
        yield f"names not {made.edits[0].path} and {made.edits[0].given}: {error!s:.300}"


def names(message: str, edit: Edit) -> bool:
    """Whether a line is about the edited key, or tells of it by a rule between keys, and shows what was given."""
    if "nested too deeply, or a number in it is too long" in message:
        return True  # such a file is not read at all
    about = (f"{edit.path}:", f"{edit.path}.", f"{edit.path}[")
    key = edit.path.rpartition(".")[2]
    if str(edit.given).startswith("[") and any(line.startswith(f"{edit.path}[") for line in message.split("\n")):
        return True  # the lines show elements of the list
    return any(shows(line, edit.given) and (line.startswith(about) or key in line) for line in message.split("\n"))


def shows(line: str, given: str | float) -> bool:
    """Whether the line has this text, or a number of this value.

    A size that is null, "auto", or in {}, is one left out; what is false or null is something that others are without.
    """
    if isinstance(given, str):
        left_out = ": missing;" in line and (given in ("null", '"auto"') or "{}" in given)
        return given in line or left_out or (given in ("false", "null") and " without " in line)
    if math.isnan(given):
        return "NaN" in line
    numbers = re.findall(r"(?<![\w.])-?(?:\d[\d.]*(?:e[+-]?\d+)?|Infinity)", line)
    return any(math.isclose(float(number.rstrip(".")), given, rel_tol=1e-12) for number in numbers)


@pytest.mark.parametrize("name", VALID)
def test_what_is_damaged_was_valid(name: str) -> None:
    config = load_config(VALID[name], 8)
    assert load_config(config.to_json()) == replace(config, notes=())


def test_the_full_config_has_every_key() -> None:
    def keys(node: Any) -> Any:
        if isinstance(node, dict):
            return {key: keys(value) for key, value in node.items() if key != "tensor_plan"}
        return [keys(entry) for entry in node if isinstance(entry, dict)] if isinstance(node, list) else None

    assert keys(FULL) == keys(load_config(FULL).to_json())


def answers(folder: Path, numbers: range) -> tuple[Answers, str]:
    """All answers, and their figures in words."""
    asked = Answers(folder)
    for number in numbers:
        asked.ask(number)
    assert not asked.wrong, f"{len(asked.wrong)} of {len(numbers)}:\n" + "\n".join(asked.wrong[:20])
    assert 0.05 < asked.accepted / len(numbers) < 0.8, "both answers are tried"
    milliseconds = 1e3 * asked.p99()
    return asked, f"{asked.accepted} of {len(numbers)} accepted; p99 of a call {milliseconds:.2f} ms of processor time"


def test_five_hundred_mutants_load_or_are_refused_in_plain_words(tmp_path: Path) -> None:
    print(answers(tmp_path, range(500))[1])


@pytest.mark.long
def test_ten_thousand_mutants_and_what_they_cost(tmp_path: Path) -> None:
    asked, figures = answers(tmp_path, range(1000, 11_000))
    print(figures)
    assert asked.p99() < P99_SECONDS, figures


def with_junk(dice: random.Random, section: Any) -> Any:
    """The section with something else in one field, or in one of a section below."""
    field = dice.choice([each for each in fields(section) if each.name not in ("notes", "written")])
    old = getattr(section, field.name)
    below = is_dataclass(old) and dice.random() < 0.7
    return replace(section, **{field.name: with_junk(dice, old) if below else plain(any_value(dice))})


def test_a_config_built_by_hand_meets_the_same_contract() -> None:
    untouched = load_config(FULL)
    for number in range(300):
        made = Mutant({}, None, ())
        try:
            config = load_config(with_junk(random.Random(number), untouched))
        except Exception as error:
            found = list(wrong_in_refusal(error, made))
        else:
            found = list(wrong_in_config(config, made))
        assert not found, f"{number}: {found}"


def refusal(source: Any, world_size: Any = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(source, world_size)
    return str(caught.value)


LOOP: dict[str, Any] = {}
LOOP["a"] = LOOP
DIGITS = 10**5000


@pytest.mark.parametrize(
    ("source", "start"),
    [
        ({"a\nb": 1}, '"a\\nb": unknown key; '),
        ({"\x1b[2J": 1}, '"\\u001b[2J": unknown key; '),
        ({"\u202eseed": 1}, '"\\u202eseed": unknown key. Did you mean seed?'),
        ({"\ud800": 1}, '"\\ud800": unknown key; '),
        ({"": 1}, '"": unknown key; '),
        ({"y" * 300_000: 1}, '"' + "y" * 56 + "...: unknown key; "),
        ({"compile.enabled": True}, '"compile.enabled": unknown key. Did you mean compile.enabled?'),
        ({"parallel.tensor": 2}, '"parallel.tensor": unknown key. Did you mean parallel.tensor?'),
        ({"fp16": {(1, 2): 1}}, 'fp16."[1, 2]": unknown key; '),
        ({"seed": "\u2028\x7f"}, 'seed: "\\u2028\\u007f" is text; '),
        ({"seed": DEEP[-1].value()}, 'seed: {"a": {"a": '),
        ({"seed": LOOP}, 'seed: {"a": {"a": '),
        ({"seed": DIGITS}, "seed: a number of thousands of digits is too large; "),
        ({"optimizer": {"type": DIGITS}}, "optimizer.type: a number of thousands of digits is not built in; "),
        (Config(optimizer=OptimizerConfig(groups=5)), "optimizer.groups: 5 is a number; "),  # type: ignore[arg-type]
        (Config(optimizer=OptimizerConfig(type=[])), "optimizer.type: [] is a list; "),  # type: ignore[arg-type]
        (Config(optimizer=OptimizerConfig(params=4)), "optimizer.params: 4 is a number; "),  # type: ignore[arg-type]
        (Config(parallel=Config), "parallel: <class 'engine.config.Config'> is a type; "),  # type: ignore[arg-type]
        (
            {"optimizer": {"type": "SGD", "params": {"nesterov": True, "momentum": 0, "dampening": 0.5}}},
            "optimizer.params.nesterov: true needs momentum above 0 and dampening 0, but momentum is 0.0 and damp",
        ),
        ("a\0b", '"a\\u0000b": this is not the name of a file; '),
        ("\ud800", '"\\ud800": this is not the name of a file; '),
        ("", '"": this file cannot be read (Is a directory); '),
    ],
)
def test_what_mutants_have_found(source: Any, start: str) -> None:
    message = refusal(source)
    assert message.startswith(start) and message.isprintable()


def test_sizes_beyond_64_bits_do_not_multiply_to_a_config_that_cannot_be_read_back() -> None:
    raw = {"train_micro_batch_size_per_gpu": 2**62, "gradient_accumulation_steps": 2}
    sentence = f"train_batch_size: {2**62} x 2 x 1 = {2**63} rows in a batch do not fit in 64 bits; give smaller sizes."
    assert refusal(raw, 1) == sentence


@pytest.mark.parametrize("world_size", [2**31, 2**63, DIGITS], ids=["2**31", "2**63", "digits"])
def test_a_world_of_impossible_size_is_named_at_once(world_size: int) -> None:
    assert refusal({"train_batch_size": 3, "parallel": {"data": 3}}, world_size).startswith("world_size: ")


def test_a_large_world_gets_small_suggestions() -> None:
    assert "parallel.tensor 1, 2, 4, 8" in refusal({"train_batch_size": 3, "parallel": {"tensor": 3}}, 2**30)


def test_a_file_of_another_kind_gets_a_short_answer(tmp_path: Path) -> None:
    words = {f"token{number}": number for number in range(20_000)}
    path = tmp_path / "vocabulary.json"
    path.write_text(json.dumps(words))
    started = time.thread_time()
    first, *lines = refusal(path).split("\n")
    assert time.thread_time() - started < 1, "each key used to be compared with each, and with all known ones"
    assert first == f"20000 problems in {path}:"
    assert len(lines) == LINES + 1 and lines[-1] == f"{path}: {20_000 - LINES} more; fix these first."
