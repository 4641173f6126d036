"""From a block to its styles: groups, ways, proof, one after the other."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from engine.errors import PlanError, first_line
from engine.parallel.tensor.auto.groups import Group
from engine.parallel.tensor.auto.proof import Truth, Verdict
from engine.parallel.tensor.auto.ways import Way, ways
from engine.parallel.tensor.cuts import Reason, TensorPlan
from engine.parallel.tensor.cutting import cut_model
from engine.parallel.tensor.styles import parse_style


@dataclass(frozen=True, slots=True)
class Decided:
    """What became of one group of a block."""

    group: Group
    way: Way
    """With "replicate": no styles."""
    why: str
    bytes: int = 0
    """Of what every rank holds for it."""


def decide(
    block: nn.Module, groups: Sequence[Group], truth: Truth, tp: int, sequence: bool = False
) -> list[Decided]:
    """The cheapest right way for each group of ``block``; each is proven beside those chosen before it."""
    styles: dict[str, str] = {}
    decided = []
    for group in groups:
        decided.append(_decide(block, group, styles, lambda plan: truth.prove(plan, tp), tp, sequence))
        styles |= decided[-1].way.styles
    return decided


def plan_of(block: nn.Module, styles: Mapping[str, str], tp: int, sequence: bool = False) -> TensorPlan:
    """The plan that styles by name in the block make of it."""
    read = {name: parse_style(text) for name, text in styles.items()}
    return cut_model(block, read, tp, "found", sequence)


def _decide(block: nn.Module, group: Group, truth: Truth, tp: int, before: Mapping[str, str]) -> Decided:
    first = ""
    for way in ways(block, group, tp):
        verdict = _try(block, {**before, **way.styles}, truth, tp)
        if verdict.holds:
            return Decided(group, way, _why(way, first, verdict))
        first = first or verdict.problem
    size = sum(p.numel() * p.element_size() for n, p in block.named_parameters() if n in group.cuts)
    return Decided(group, Way("replicate", {}), f"no way is right: {first}", size)


def _try(block: nn.Module, styles: Mapping[str, str], truth: Truth, tp: int) -> Verdict:
    try:
        plan = plan_of(block, styles, tp)
    except PlanError as error:
        return Verdict(first_line(error))
    return truth.prove(plan, tp)


def _why(way: Way, first: str, verdict: Verdict) -> str:
    gathers = f"; gathers for {', '.join(verdict.gathers)}" if verdict.gathers else ""
    if way.how == "local":
        return f"plain tensors{gathers}"
    if way.how == "local+":
        return f"divided {', '.join(way.changes)}{gathers}"
    return f"plain tensors: {first or 'the weight is no layer of its own'}{gathers}"


__all__ = ["Decided", "Reason", "decide", "plan_of"]
