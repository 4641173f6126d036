"""Resolution of ``parallel.tensor_plan``: a tensor plan from the user's styles, or from a JSON file with them.

A plan is data. It is made from names and shapes alone, so a model on the meta device is enough, and it is the same on
every rank. ``layers.apply_plan`` applies it to a model, and the shard table takes its ranges. For the setting "auto",
``auto`` searches for the plan instead.
"""

from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase

from torch import nn

from engine.errors import PlanError
from engine.parallel.model.name_patterns import refuse_unmatched
from engine.parallel.tensor.plan.sharding_rules import cut_model
from engine.parallel.tensor.plan.styles import Patterns, Style, parse_style, read_setting
from engine.parallel.tensor.plan.tensor_plan import TensorPlan


def find_tensor_plan(model: nn.Module, setting: str | Mapping[str, str], tp: int, sequence: bool = False) -> TensorPlan:
    """Makes the plan for ``tp`` tensor ranks from names, shapes and attributes; communicates nothing.

    ``setting`` is ``parallel.tensor_plan``: a mapping {name pattern: style}, or the path of a JSON file with one;
    ``plan.styles`` defines the language.

    Raises:
        ConfigError: the file does not hold such a mapping.
        PlanError: the plan does not fit the model, or the model does not fit ``tp``; sizes that fit are named.
    """
    source, patterns = read_setting(setting)
    plan = cut_model(model, match_styles(model, patterns), tp, source, sequence)
    return replace(plan, patterns=patterns)


def match_styles(model: nn.Module, patterns: Patterns) -> dict[str, Style]:
    """Returns the style of each module or parameter that a pattern matches, by its first name.

    A pattern is matched against modules first, and against parameters only if it matches no module.

    Raises:
        PlanError: a pattern that matches nothing, two styles for one module, or an invalid style.
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
                    f"{first_name} gets two styles, {before.text!r} from {other!r} and {text!r} from {pattern!r}, but "
                    "takes only one; narrow one of the patterns."
                )
    return {name: style for name, (_, style) in chosen.items()}
