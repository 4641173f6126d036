"""Which stages and gather groups of a rank use a parameter: what decides which bucket it shares with others."""

from dataclasses import dataclass
from functools import cached_property

from engine.parallel.pipeline.cut import Cut
from engine.parallel.pipeline.timeline import Timeline
from engine.parallel.shards import ShardRow
from engine.zero.gather_groups import GatherGroups
from engine.zero.gather_order import EVERYWHERE
from engine.zero.layout import Turn


@dataclass(frozen=True)
class Users:
    """Of all parameters of a model."""

    stages_of_rank: tuple[tuple[int, ...], ...]
    cut: Cut | None
    timeline: Timeline | None
    gathers: GatherGroups | None
    """None where parameters are whole on every rank."""

    def stages(self, row: ShardRow, pp: int) -> tuple[int, ...]:
        """The stages of a rank that use a parameter; nothing where the rank has one stage."""
        here = self.stages_of_rank[pp]
        if self.cut is None or len(here) == 1:
            return ()
        return tuple(stage for stage in here if row.name in self.cut.stages[stage].parameters)

    def turns(self, row: ShardRow, pp: int) -> tuple[Turn, ...]:
        """When a rank needs a sharded parameter whole; nothing where parameters are not sharded."""
        if self.gathers is None:
            return ()
        groups = self.gathers.of_parameter[row.name]
        if row.in_glue or not groups:
            return (EVERYWHERE,)
        stages = self.stages(row, pp) or self.stages_of_rank[pp]
        turns = [Turn(stage, group) for stage in stages for group in groups]
        called = [turn for turn in turns if turn in self._called]
        return tuple(called or turns[:1])  # what nobody calls is gathered all the same, once

    @cached_property
    def _called(self) -> frozenset[Turn]:
        """Every group in every stage that calls one of its modules."""
        if self.gathers is None:
            return frozenset()
        groups = enumerate(self.gathers.modules)
        group_of = {module: group for group, modules in groups for module in modules}
        if self.cut is None or self.timeline is None:
            return frozenset(Turn(0, group) for group in group_of.values())
        units = {
            call.unit: [group for module, group in group_of.items() if _are_related(module, call.unit)]
            for call in self.timeline.calls
        }
        calls = zip(self.timeline.calls, self.cut.stage_of_call, strict=True)
        return frozenset(Turn(stage, group) for call, stage in calls for group in units[call.unit])


def _are_related(module: str, unit: str) -> bool:
    """Whether one is the other, or lies in it."""
    return module == unit or not module or unit.startswith(f"{module}.") or module.startswith(f"{unit}.")
