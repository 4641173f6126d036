"""A tensor plan from styles that the user gives: which layers are cut, which part of every parameter a rank holds.

A plan is data, made from names and shapes alone (a model on the meta device will do) and the same on every rank.
``install`` carries it out; the shard table takes its ranges from it. Where the user says "auto", it is found instead:
``auto``.
"""

from collections.abc import Mapping
from dataclasses import replace

from torch import nn

from engine.parallel.tensor.cuts import AttributeChange, LayerCut, ParameterCut, TensorPlan
from engine.parallel.tensor.cutting import cut_model
from engine.parallel.tensor.match import match_styles, read_setting

__all__ = ["AttributeChange", "LayerCut", "ParameterCut", "TensorPlan", "find_tensor_plan"]


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
