"""Settings of a sweep: the file ``sweep.json``, with all mistakes in one error, before any rank communicates."""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Literal

from engine.config import Config
from engine.config.config_file import read_config_file
from engine.config.deepspeed.keys import KEYS
from engine.config.reader import paths, read_section, setting
from engine.config.rules import Choice, Flag, FrozenMap, Int, Problems, Real, RefusedError, Rule, Text
from engine.config.wording import join_path, kind, show_path, shown_value

METRICS = ("loss", "grad_norm", "seconds", "tokens_per_second", "tflops", "mfu", "peak_bytes", "bytes_sent")
"""Numbers of a step report that a sweep can minimize or maximize, besides ``metrics/NAME``."""
_OWN = ("checkpoint.folder",)
"""Keys that each trial sets itself."""
_FORMS = '{"log": [LOW, HIGH]}, {"uniform": [LOW, HIGH]}, {"int": [LOW, HIGH]} or {"choices": [...]}'
_INDEX = re.compile(r"\.\d+(?=\.|$)")


@dataclass(frozen=True, slots=True)
class Dimension:
    """One key of the configuration that a sweep varies, with its possible values."""

    path: str
    """Dotted key, such as ``optimizer.params.lr``."""
    form: str
    """One of "log", "uniform", "int" and "choices"."""
    values: tuple[Any, ...]
    """(low, high), both included; of "choices", the JSON text of each choice."""

    @property
    def listed(self) -> tuple[Any, ...] | None:
        """All values in order, as Optuna stores them: integers, or JSON texts of choices; None for a range of real
        numbers.
        """
        if self.form == "choices":
            return self.values
        return tuple(range(self.values[0], self.values[1] + 1)) if self.form == "int" else None

    def decode(self, stored: Any) -> Any:
        """Returns the configuration's JSON value for ``stored``, a value as Optuna stores it."""
        return json.loads(stored) if self.form == "choices" else stored


@dataclass(frozen=True, slots=True)
class Component:
    """Choice of an Optuna pruner or sampler: its name, such as "median", and the arguments of its class."""

    type: str
    params: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Space(Rule):
    """Parsing rule for the section "space", a mapping from dotted configuration keys to ranges or lists of values."""

    def read(self, value: object, at: str, problems: Problems) -> object:
        if not isinstance(value, Mapping) or not value:
            empty = "has no key to change" if isinstance(value, Mapping) else f"is {kind(value)}"
            problems.add(at, f'{shown_value(value)} {empty}; give {{"optimizer.params.lr": {{"log": [1e-5, 1e-2]}}}}.')
            return None
        known = {*paths(Config), *KEYS}
        for path in value:
            _check_path(path, known, problems)
        read = [_dimension(path, entry, join_path(at, path), problems) for path, entry in value.items()]
        return tuple(each for each in read if each is not None)

    def expected(self) -> str:
        return "an object of dotted keys"


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentRule(Rule):
    """Parsing rule for a pruner or sampler: its name, or an object with "type" and "params"."""

    def accept(self, value: object) -> object:
        given = {"type": value} if isinstance(value, str) else value
        if not isinstance(given, Mapping):
            raise RefusedError(f"is {kind(value)}")
        name, params = given.get("type"), given.get("params", {})
        if not isinstance(name, str) or not isinstance(params, Mapping) or not {*given} <= {"type", "params"}:
            raise RefusedError("lacks a type, or has other keys")
        return Component(name, FrozenMap(params))

    def expected(self) -> str:
        return 'a name, or {"type": NAME, "params": {...}}'


@dataclass(frozen=True, kw_only=True)
class SweepConfig:
    """Settings of a sweep, from ``sweep.json``."""

    space: tuple[Dimension, ...] = setting((), Space(), required=True)
    """Keys of the configuration that trials set, and their values."""
    pruner: Component = setting(Component("successive_halving", FrozenMap()), ComponentRule())
    """Pruner of Optuna, which stops trials."""
    sampler: Component = setting(Component("tpe", FrozenMap()), ComponentRule())
    """Sampler of Optuna, which chooses values; a ``seed`` makes the choices of each trial repeatable."""
    metric: str | None = setting("loss", Text(noun="the name of a number", null=True))
    """Number of the step report, or ``metrics/NAME``; null: the loop calls ``trial.report``."""
    direction: Literal["minimize", "maximize"] = setting(
        "minimize", Choice(options=("minimize", "maximize"), noun="a direction")
    )
    """Direction in which the metric improves."""
    trials: int | None = setting(None, Int(low=1, null=True))
    """Number of trials of all processes together; null with ``grid``."""
    grid: bool = setting(False, Flag())
    """Runs each combination of the values once, in an order that is always the same, without the sampler."""
    report_every: int = setting(1, Int(low=1))
    """Updates between two reports to the pruner; each reports the mean of the metric over them."""
    journal: str = setting("sweep.journal", Text(noun="the name of a file"))
    """File that all processes of the sweep share."""

    @property
    def folder(self) -> Path:
        """Folder next to Optuna's journal file of the sweep, with one subfolder for each trial."""
        return Path(f"{self.journal}.trials").absolute()

    @property
    def count(self) -> int:
        """Number of trials: ``trials`` or, with ``grid``, the number of all combinations of values."""
        if self.trials is not None:
            return self.trials
        return prod(len(each.listed or ()) for each in self.space)

    @property
    def identity(self) -> dict[str, Any]:
        """Settings, as JSON values by name, that must be equal in all processes of one sweep."""
        space = {each.path: {each.form: list(each.values)} for each in self.space}
        return {"space": space, "metric": self.metric, "direction": self.direction, "grid": self.grid}


SweepSource = Mapping[str, Any] | str | os.PathLike[str] | SweepConfig


def read_sweep(source: SweepSource) -> SweepConfig:
    """Returns the settings of a sweep from a JSON file, a dict, or a ``SweepConfig``. No communication.

    Raises:
        ConfigError: the settings have mistakes; the message, the same on every rank, lists them all.
    """
    if isinstance(source, SweepConfig):
        return source
    name = show_path(os.fsdecode(source)) if isinstance(source, (str, os.PathLike)) else "the sweep"
    problems = Problems(name, tuple(paths(Config)), KEYS)
    raw = read_config_file(source, problems) if isinstance(source, (str, os.PathLike)) else source
    settings = read_section(SweepConfig, raw, "", problems)
    _check_between(settings, problems)
    problems.raise_if_any()
    return settings


def _check_path(path: object, known: set[str], problems: Problems) -> None:
    plain = _INDEX.sub("", path) if isinstance(path, str) else ""
    if plain in known:
        if plain in _OWN:
            problems.add(plain, 'the sweep sets this key itself for each trial; leave it out of "space".')
        return
    parent, _, key = plain.rpartition(".")
    level = [each.rpartition(".")[2] for each in sorted(known) if each.rpartition(".")[0] == parent]
    problems.unknown(parent, key if plain else path, level)


def _dimension(path: str, entry: object, at: str, problems: Problems) -> Dimension | None:
    """Returns the values of one key, or None after a problem."""
    form = next(iter(entry)) if isinstance(entry, Mapping) and len(entry) == 1 else None
    values = entry[form] if isinstance(entry, Mapping) and form is not None else None
    if form not in ("log", "uniform", "int", "choices") or not isinstance(values, (list, tuple)):
        problems.add(at, f"{shown_value(entry)} is no form of values; give {_FORMS}.")
        return None
    if form == "choices":
        try:
            texts = tuple(dict.fromkeys(json.dumps(value) for value in values))
        except TypeError:
            problems.add(at, f"{shown_value(values)} contains a value that JSON cannot express; give JSON values.")
            return None
        if not texts:
            problems.add(at, "the list of choices is empty; give at least one value.")
        return Dimension(path, form, texts)
    rule = Int() if form == "int" else Real(above=0) if form == "log" else Real()
    if len(values) != 2:
        problems.add(at, f"{shown_value(values)} has {len(values)} entries; give [LOW, HIGH].")
        return None
    read = [rule.read(value, at, problems) for value in values]
    low, high = read
    if low is None or high is None:
        return None
    if not low < high:  # type: ignore[operator]
        problems.add(at, f"{shown_value(values)} is no range, because {low:g} is not below {high:g}; give [LOW, HIGH].")
    return Dimension(path, str(form), (low, high))


def _check_between(settings: SweepConfig, problems: Problems) -> None:
    metric = settings.metric
    if metric is not None and metric not in METRICS and not metric.startswith("metrics/"):
        problems.add(
            "metric", f"{shown_value(metric)} is no number of a step report; give {', '.join(METRICS)} or metrics/NAME."
        )
    if not settings.grid:
        if settings.trials is None and not problems.touch("trials"):
            problems.add("trials", "missing; give the number of trials, or set grid to true.")
        return
    if settings.trials is not None:
        problems.add("trials", f"{settings.trials} is given, but grid runs each combination once; leave trials out.")
    for each in settings.space:
        if each.listed is None:
            problems.add(
                join_path("space", each.path),
                f'grid tries each value of a key, but {{"{each.form}": ...}} is a range of real numbers; give '
                '{"choices": [...]}, or set grid to false and give trials.',
            )
