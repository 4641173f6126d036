"""From a block to its styles: groups, ways, proof, one after the other."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from engine.errors import PlanError, first_line
from engine.parallel.tensor.auto.groups import Group
from engine.parallel.tensor.auto.proof import PROOF, Truth, Verdict
from engine.parallel.tensor.auto.ways import Way, ways
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


@dataclass(frozen=True, slots=True)
class Search:
    """Looks for the cheapest right way to run the groups of ``block``, which ``truth`` was made of."""

    block: nn.Module
    truth: Truth
    sequence: bool = False
    """Whether the stream between regions is cut along the sequence."""

    def decide(self, groups: Sequence[Group], tp: int) -> list[Decided]:
        """One way for each group; each is proven beside those chosen before it."""
        styles: dict[str, str] = {}
        decided = []
        for group in groups:
            decided.append(self._decide(group, styles, tp))
            styles |= decided[-1].way.styles
        return decided

    def _decide(self, group: Group, before: Mapping[str, str], tp: int) -> Decided:
        first = ""
        for way in ways(self.block, group, tp):
            verdict = self._try({**before, **way.styles}, tp)
            if verdict.holds:
                return Decided(group, way, _why(way, first, verdict))
            first = first or verdict.problem
        size = sum(p.numel() * p.element_size() for n, p in self.block.named_parameters() if n in group.cuts)
        return Decided(group, Way("replicate", {}), f"no way is right: {first}", size)

    def _try(self, styles: Mapping[str, str], tp: int) -> Verdict:
        try:
            read = {name: parse_style(text) for name, text in styles.items()}
            plan = cut_model(self.block, read, tp, "found", self.sequence)
        except PlanError as error:
            return Verdict(first_line(error))
        return self.truth.prove(plan, tp)


def _why(way: Way, first: str, verdict: Verdict) -> str:
    gathering = ", ".join(name for name in verdict.gathers if name != PROOF)
    gathers = f"; gathers for {gathering}" if gathering else ""
    if way.how == "local":
        return f"plain tensors{gathers}"
    if way.how == "local+":
        return f"divided {', '.join(way.changes)}{gathers}"
    return f"plain tensors: {first or 'the weight is no layer of its own'}{gathers}"
