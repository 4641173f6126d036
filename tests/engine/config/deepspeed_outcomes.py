"""The effect of every key in the DeepSpeed configurations of ``tests/engine/config/deepspeed``.

acted on    the run does what the key asks
passed on   ``engine.deepspeed`` passes it to the model's forward, and a note tells it
off         the value asks for nothing, or for the engine's only behaviour
noted       accepted without effect; a note of the run gives the reason
refused     the run does not start; the sentence gives the remedy
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

from engine.config import Config, load_config
from engine.config.deepspeed.keys import KEYS, LOGS, TABLE, Feature, Moved, Noted, Only, WithMode
from engine.config.deepspeed.translate import translate
from engine.config.reader import paths
from engine.config.rules import Problems
from engine.errors import ConfigError
from engine.hosting.arguments import fill_auto
from tests.structure import ROOT

FOLDER = ROOT / "tests" / "engine" / "config" / "deepspeed"
Outcome = Literal["acted on", "passed on", "noted", "off", "refused"]
OURS = frozenset(paths(Config))


@dataclass(frozen=True, slots=True)
class Told:
    """What a configuration is told, by JSON path."""

    refusals: tuple[str, ...]
    notes: tuple[str, ...]


ARGUMENTS = SimpleNamespace(
    per_device_train_batch_size=8, gradient_accumulation_steps=1, max_grad_norm=1.0, fp16=False, bf16=True,
    learning_rate=5e-5, adam_beta1=0.9, adam_beta2=0.999, adam_epsilon=1e-8, weight_decay=0.0, warmup_steps=100,
    max_steps=1000,
)  # fmt: skip
"""Arguments as the Hugging Face Trainer has them, which fill "auto"."""


def files() -> dict[str, Any]:
    """The configurations, by file name, with every "auto" filled from arguments."""
    texts = {path.name: path.read_text(encoding="utf-8") for path in sorted(Path(FOLDER).glob("*.json"))}
    return {name: fill_auto(json.loads(text), ARGUMENTS) for name, text in texts.items()}


def told(raw: Mapping[str, Any]) -> Told:
    """Its refusals and notes, also the notes of a refused configuration."""
    _, notes = translate(raw, OURS, Problems("the config", tuple(OURS), KEYS))
    try:
        notes = load_config(raw).notes
    except ConfigError as error:
        return Told(tuple(line for line in str(error).splitlines() if not line.endswith("in the config:")), notes)
    return Told((), notes)


def leaves(raw: Mapping[str, Any], at: str = "") -> Iterator[tuple[str, object]]:
    """Its keys that have an outcome of their own: values, and sections that are treated as a whole."""
    for key, value in raw.items():
        path = f"{at}.{key}" if at else key
        if isinstance(value, dict) and path not in TABLE and (is_section(path) or is_theirs(path)):
            yield from leaves(value, path)
        else:
            yield path, value


def is_section(path: str) -> bool:
    """Whether Trine has keys below this path."""
    return any(ours.startswith(f"{path}.") for ours in OURS)


def is_theirs(path: str) -> bool:
    """Whether DeepSpeed has keys below this path."""
    return any(theirs.startswith(f"{path}.") for theirs in TABLE)


def outcome(path: str, value: object, said: Told) -> Outcome | None:
    """What becomes of a key; None: nothing is said and nothing is done."""
    if any(about(line, path) for line in said.refusals):
        return "refused"
    if notes := [line for line in said.notes if about(line, path)]:
        if any("engine.deepspeed passes" in line for line in notes):
            return "passed on"
        return "acted on" if any(" acts as " in line for line in notes) else "noted"
    match TABLE.get(path):
        case Feature(switch=switch, off=off, keys=keys) if isinstance(value, Mapping) and keys:
            return "off" if value.get(switch) in off else "acted on"
        case Only() | Feature() | WithMode():
            return "off"
        case Moved(idle=idle):
            return "off" if value in idle else "acted on"
        case Noted(idle=idle):
            return "off" if value in idle else None
    params = path.split(".params.")[0] + ".type" if ".params." in path else path
    if path in (*LOGS, "wandb") and isinstance(value, Mapping) and not value.get("enabled"):
        return "off"
    if path in OURS or path in ("bfloat16", *LOGS):
        return "refused" if any(about(line, params) for line in said.refusals) else "acted on"
    return "refused" if any(about(line, params) for line in said.refusals) else None


def about(line: str, path: str) -> bool:
    """Whether a sentence is about this key, or about what lies in or around it."""
    named = line.partition(": ")[0]
    return named == path or named.startswith(f"{path}.") or path.startswith(f"{named}.")


def outcomes(raw: Mapping[str, Any]) -> dict[str, Outcome | None]:
    """Key -> what becomes of it."""
    said = told(raw)
    return {path: outcome(path, value, said) for path, value in leaves(raw)}
