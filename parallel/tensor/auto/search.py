"""From a block to its styles: for each group of parameters the cheapest strategy that passes the proof.

    at once      all groups with plain tensors
    by module    each group in the module around it, and then the block with what was found
    one by one   each group in the block, beside those that are decided

The first of them whose proof of the whole block holds decides.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from engine.errors import PlanError, first_line
from engine.parallel.tensor.auto.attribute_reads import AttributeReads
from engine.parallel.tensor.auto.coupled_parameters import CoupledParameters
from engine.parallel.tensor.auto.enclosing_module import (
    enclosing_module,
    group_inside,
    reference_inside,
    strategy_outside,
)
from engine.parallel.tensor.auto.equivalence import PROOF, BlockReference, Verdict
from engine.parallel.tensor.auto.strategies import (
    Number,
    ShardingStrategy,
    divisible_attributes,
    local,
    view,
    with_numbers,
)
from engine.parallel.tensor.plan.sharding_rules import cut_model
from engine.parallel.tensor.plan.styles import parse_style

MOST = 3
"""The most numbers that one strategy divides."""
TRIES = 24
"""The most sets of numbers that are tried for a group."""


@dataclass(frozen=True, slots=True)
class Decided:
    """The decision about one group of a block."""

    group: CoupledParameters
    way: ShardingStrategy
    """The chosen strategy; "replicate" has no styles."""
    note: str

    @property
    def why(self) -> str:
        """Why it was chosen, in words."""
        return f"divided {', '.join(self.way.changes)}{self.note}" if self.way.changes else self.note


@dataclass(frozen=True, slots=True)
class Search:
    """Searches the cheapest right strategy for the groups of ``block``; ``truth`` is the reference of that block."""

    block: nn.Module
    truth: BlockReference
    sequence: bool = False
    """Whether activations between regions are sharded along the sequence."""
    known: tuple[Decided, ...] = ()
    """What was decided about groups of other blocks, which is tried first for equal ones."""

    def decide(self, groups: Sequence[CoupledParameters], tp: int) -> list[Decided]:
        """A strategy for each group, all of them proven together in the block."""
        found = (self._at_once(groups, tp) or self._by_module(groups, tp)) if len(groups) > 1 else []
        return found or self._one_by_one(groups, tp)

    def _at_once(self, groups: Sequence[CoupledParameters], tp: int) -> list[Decided]:
        """What is known of the groups of other blocks, and plain tensors for the others; empty if that is wrong."""
        found = [one for group in groups if (one := self._likely(group, tp)) is not None]
        if len(found) < len(groups):
            return []
        verdict = self._try({}, _together(one.way for one in found), tp)
        return [replace(one, note=one.note or _note(one.way, "", verdict)) for one in found] if verdict.holds else []

    def _likely(self, group: CoupledParameters, tp: int) -> Decided | None:
        """What is known of an equal group, or else plain tensors, if they can be."""
        before = (one for one in self.known if one.group == group and one.way.how != "replicate")
        way = local(self.block, group, tp)
        return next(before, None if way is None else Decided(group, way, ""))

    def _by_module(self, groups: Sequence[CoupledParameters], tp: int) -> list[Decided]:
        """The strategies that are right in the modules around the groups; empty if they are wrong in the block."""
        paths = [enclosing_module(group) for group in groups]
        if "" in paths:
            return []
        decided: dict[str, Decided] = {}
        for path in dict.fromkeys(paths):
            truth = reference_inside(self.truth, path)
            if truth is None:
                return []
            mine = [group for group, other in zip(groups, paths, strict=True) if other == path]
            inner = Search(truth.block, truth, self.sequence)
            found = inner._one_by_one([group_inside(group, path) for group in mine], tp)
            for group, one in zip(mine, found, strict=True):
                decided[group.row] = Decided(group, strategy_outside(one.way, path), one.note)
        together = _together(one.way for one in decided.values())
        right = not together.styles or self._try({}, together, tp).holds
        return [decided[group.row] for group in groups] if right else []

    def _one_by_one(self, groups: Sequence[CoupledParameters], tp: int) -> list[Decided]:
        """A strategy for each group, proven together with those chosen before it.

        Groups without a right strategy are tried once more together with all others: code between groups may reject a
        sharded input beside a replicated one.
        """
        styles: dict[str, str] = {}
        decided: dict[str, Decided] = {}
        for again in (False, True):
            for group in groups:
                if not again or (decided[group.row].way.how == "replicate" and styles):
                    found = self._decide(group, styles, tp)
                    if not again or found.way.how != "replicate":
                        decided[group.row] = found
                    styles |= found.way.styles
        return list(decided.values())

    def _decide(self, group: CoupledParameters, before: Mapping[str, str], tp: int) -> Decided:
        first = ""
        if (plain := local(self.block, group, tp)) is not None:
            verdict = self._try(before, plain, tp)
            if verdict.holds:
                return Decided(group, plain, _note(plain, "", verdict))
            first = verdict.problem
            if (found := self._with_numbers(group, before, plain, first, tp)) is not None:
                return found
        for partial in (True, False) if group.partial else (True,):
            way = view(self.block, group, tp, partial)
            verdict = self._try(before, way, tp)
            if verdict.holds:
                return Decided(group, way, _note(way, first, verdict))
        return Decided(
            group, ShardingStrategy("replicate", {}), f"no strategy is right: {_problems(first, verdict.problem)}"
        )

    def _with_numbers(
        self, group: CoupledParameters, before: Mapping[str, str], plain: ShardingStrategy, problem: str, tp: int
    ) -> Decided | None:
        """Divide one number; where that changes the problem, divide a second one as well, and so on."""
        all_numbers = divisible_attributes(self.block, group, tp)
        problems: dict[tuple[Number, ...], str] = {(): problem}
        reads: dict[tuple[Number, ...], set[Number]] = {(): self._watched(before, plain, all_numbers, tp)[1]}
        frontier: list[tuple[Number, ...]] = [()]
        while frontier:
            chosen = frontier.pop(0)
            for number in all_numbers:
                wider = tuple(sorted({*chosen, number}))
                if wider in problems or len(problems) > TRIES:
                    continue
                if number not in reads[chosen]:
                    problems[wider], reads[wider] = problems[chosen], reads[chosen]
                    continue
                way = with_numbers(plain, wider)
                verdict, reads[wider] = self._watched(before, way, all_numbers, tp)
                if verdict.holds and (verdict := self._try(before, way, tp)).holds:  # as it is, and not watched
                    return Decided(group, way, _note(way, "", verdict))
                problems[wider] = verdict.problem
                if verdict.problem != problems[chosen] and len(wider) < MOST:
                    frontier.append(wider)
        return None

    def _watched(
        self, before: Mapping[str, str], way: ShardingStrategy, numbers: Sequence[Number], tp: int
    ) -> tuple[Verdict, set[Number]]:
        """The verdict on a strategy, and which of ``numbers`` the code has read."""
        reads = AttributeReads(numbers)
        return self._try(before, way, tp, reads.watch), reads.seen

    def _try(
        self,
        before: Mapping[str, str],
        way: ShardingStrategy,
        tp: int,
        watch: Callable[[nn.Module], None] | None = None,
    ) -> Verdict:
        try:
            read = {name: parse_style(text) for name, text in {**before, **way.styles}.items()}
            plan = cut_model(self.block, read, tp, "found", self.sequence)
        except PlanError as error:
            return Verdict(first_line(error))
        return self.truth.prove(plan, tp, watch)


def _problems(plain: str, views: str) -> str:
    return f"plain tensors: {plain}; global tensors: {views}" if plain else views


def _together(ways: Iterable[ShardingStrategy]) -> ShardingStrategy:
    return ShardingStrategy("", {name: style for way in ways for name, style in way.styles.items()})


def _note(way: ShardingStrategy, first: str, verdict: Verdict) -> str:
    """What :attr:`Decided.why` says besides the numbers that are divided."""
    gathering = ", ".join(name for name in verdict.gathers if name != PROOF)
    gathers = f"; gathers for {gathering}" if gathering else ""
    if way.how == "local":
        return f"plain tensors{gathers}"
    if way.how == "local+":
        return gathers
    return f"plain tensors: {first or 'the weight is not that of a linear layer'}{gathers}"
