"""A tensor plan from styles that the user gives: which layers are cut, which part of every parameter a rank holds.

A plan is data, made from names and shapes alone (a model on the meta device will do) and the same on every rank.
``install`` carries it out; the shard table takes its ranges from it. Where the user says "auto", it is found instead:
``auto``.

From ``parallel.tensor_plan`` to a style for each module.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase

from torch import nn

from engine.errors import ConfigError, PlanError
from engine.parallel.model.name_patterns import refuse_unmatched
from engine.parallel.tensor.plan.sharding_rules import cut_model
from engine.parallel.tensor.plan.styles import Style, parse_style
from engine.parallel.tensor.plan.tensor_plan import TensorPlan


def find_tensor_plan(model: nn.Module, setting: str | Mapping[str, str], tp: int, sequence: bool = False) -> TensorPlan:
    """The plan for ``tp`` tensor ranks; reads names, shapes and attributes, communicates nothing.

    ``setting`` is ``parallel.tensor_plan``: a mapping {name pattern: style}, or the path of a JSON file with one;
    ``styles`` has the language.

    Raises:
        ConfigError: the file cannot be read as such a mapping.
        PlanError: the plan does not fit the model, or the model does not fit ``tp``; the sizes that fit are named.
    """
    source, patterns = read_setting(setting)
    plan = cut_model(model, match_styles(model, patterns), tp, source, sequence)
    return replace(plan, patterns=patterns)


Patterns = Mapping[str, str]
EXAMPLE = '{"*.query": "column", "*.output": "row"}'


def read_setting(setting: str | Patterns) -> tuple[str, Patterns]:
    """(where it comes from, style by pattern).

    Raises:
        ConfigError: a file that holds no such mapping.
    """
    return ("parallel.tensor_plan", setting) if not isinstance(setting, str) else (setting, _read_file(setting))


def _read_file(path: str) -> Patterns:
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(
            f"parallel.tensor_plan = {path!r} cannot be read ({reason}); give a JSON file with {EXAMPLE}."
        ) from error
    if not (isinstance(found, dict) and found and all(isinstance(style, str) for style in found.values())):
        raise ConfigError(f"parallel.tensor_plan = {path!r} holds no object of styles; write it as {EXAMPLE}.")
    return found


def match_styles(model: nn.Module, patterns: Patterns) -> dict[str, Style]:
    """The style of each module or parameter that a pattern names, by its first name.

    A pattern that names modules means those; only one that names none is looked for among the parameters.

    Raises:
        PlanError: a pattern that names nothing, two styles for one module, a style that is none.
    """
    first: dict[int, str] = {}
    names = {
        name: first.setdefault(id(module), name) for name, module in model.named_modules(remove_duplicate=False) if name
    }
    owned: dict[int, str] = {}
    parameters = {
        name: owned.setdefault(id(parameter), name)
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }
    given = [("parallel.tensor_plan", pattern) for pattern in patterns]
    refuse_unmatched(given, [*names, *parameters], "module and no parameter", PlanError)
    chosen: dict[str, tuple[str, Style]] = {}
    for pattern, text in patterns.items():
        style = parse_style(text)
        hits = [name for name in names if fnmatchcase(name, pattern)]
        hits = hits or [name for name in parameters if fnmatchcase(name, pattern)]
        for name in hits:
            first_name = names.get(name) or parameters[name]
            other, before = chosen.setdefault(first_name, (pattern, style))
            if before != style:
                raise PlanError(
                    f"{first_name} is given two styles, {before.text!r} by {other!r} and {text!r} by {pattern!r}; a "
                    "module has one: narrow one of the patterns."
                )
    return {name: style for name, (_, style) in chosen.items()}
