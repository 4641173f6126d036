"""A long model is counted by short ones: what each further period of alike blocks adds is the same.

    blocks    | first | A A | last      rehearsed with 2, 3 and 4 periods
              | first | A A A | last
              | first | A A A A | last
    model     | first | A A A A A A .. A | last      continued, if the three lie on a line

Over an action the level of live bytes is what it was before, plus a part for each period. So what an action leaves is
linear in their number. The highest level is that of the first or of the last period, or of what is around them: the
maximum of a constant and a line whose slope is that of what is left. Once it grows by that slope (or, where bytes are
freed, stays), it does so for any number of periods, and what is continued is exact. The highest level behind the last
action is that of reductions which wait for the end of the step; of it only the line is known. Buckets have to repeat
as blocks do, up to those of the whole model. Anything else is not continued.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from copy import deepcopy
from dataclasses import replace
from itertools import pairwise

from torch import nn

from engine.dry_run.dry_run_rank import DryRunStep
from engine.dry_run.repeating_blocks import AlikeRun, KindNames, longest_run
from engine.errors import EngineError
from engine.parallel.grid import Coord
from engine.planning.activation_memory import ActionMemory
from engine.planning.plan import Plan

PERIODS = (2, 3, 4)
"""Of the short models."""

PlanOf = Callable[[nn.Module], Plan]
"""The plan of a model with fewer blocks, under the same configuration."""


def shortened_step(
    model: nn.Module, plan: Plan, run_dry: Callable[[nn.Module, Plan], DryRunStep], plan_of: PlanOf
) -> DryRunStep | None:
    """The step of a rank without a pipeline, from rehearsals of short models; None if it has to be rehearsed whole."""
    run = longest_run(model)
    if run is None or run.periods <= sum(PERIODS) or not _is_even(plan):
        return None
    given = list[tuple[nn.Module, Plan]]()
    try:
        for periods in PERIODS:
            short = shorten(model, run, periods)
            made = plan_of(short)
            if _pinned(made) != _pinned(plan):
                return None
            given.append((short, made))
        if not _repeats([_buckets(*each) for each in given], _buckets(model, plan), run.periods):
            return None
        steps = [run_dry(*each) for each in given]
    except (EngineError, IndexError):  # code that insists on its number of blocks, which the whole model has
        return None
    return continued(steps, run.periods)


def shorten(model: nn.Module, run: AlikeRun, periods: int) -> nn.Module:
    """A copy with so many periods of the run; blocks in front of it stay."""
    short = deepcopy(model)
    blocks = short.get_submodule(run.blocks)
    if isinstance(blocks, nn.ModuleList | nn.Sequential):
        del blocks[run.start + periods * run.period :]
    return short


def _is_even(plan: Plan) -> bool:
    """Every block is treated like the others: nothing counts blocks, or fills a budget with the first of them."""
    settings = plan.config.activation_checkpointing
    return plan.config.pp == 1 and settings.every is None and settings.mode != "offload" and not plan.hosted(_FIRST)


_FIRST = Coord()


def _pinned(plan: Plan) -> int:
    """Buckets that stay gathered, up to a limit in bytes, so not as many more as blocks are more."""
    gathers = plan.gathers(_FIRST)
    return 0 if gathers is None else len(gathers.pinned)


def _buckets(model: nn.Module, plan: Plan) -> Counter[Hashable]:
    """How often each bucket occurs that is alike but for the position of its blocks; of deferred ones the elements."""
    found, names, layout = Counter[Hashable](), KindNames(model), plan.layout(_FIRST)
    for bucket in (*layout.buckets, *layout.frozen):
        kind = bucket.dtype, bucket.ties, bucket.partial, bucket.exact
        if bucket.late:
            found[kind] += bucket.elements
        else:
            slots = tuple((names.of(slot.name), slot.shape, slot.start) for slot in bucket.slots)
            found[*kind, bucket.elements, slots] += 1
    return found


def _repeats(layouts: Sequence[Counter[Hashable]], whole: Counter[Hashable], periods: int) -> bool:
    """Each period adds the same buckets, and so many of them are the buckets of the whole model."""
    last = layouts[-1]
    for kind in whole.keys() | last.keys():
        more = _slope([layout[kind] for layout in layouts])
        if more is None or last[kind] + (periods - PERIODS[-1]) * more != whole[kind]:
            return False
    return True


def continued(steps: Sequence[DryRunStep], periods: int) -> DryRunStep | None:
    """The step of a model with ``periods``, from those with PERIODS; None if they do not lie on a line."""
    last, times = steps[-1], periods - PERIODS[-1]
    base, end = (_slope([getattr(step, name) for step in steps]) for name in ("base", "end_rise"))
    if base is None or end is None or end < 0 or len({*map(_keys, steps)}) > 1:
        return None
    actions = {}
    for key in last.actions:
        found = _action([step.actions[key] for step in steps], times)
        if found is None:
            return None
        actions[key] = found
    return replace(last, actions=actions, base=last.base + times * base, end_rise=last.end_rise + times * end)


def _keys(step: DryRunStep) -> frozenset[object]:
    return frozenset(step.actions)


def _action(found: Sequence[ActionMemory], times: int) -> ActionMemory | None:
    left, rise = (_slope([getattr(memory, name) for memory in found]) for name in ("left", "rise"))
    if left is None or rise is None or rise != max(0, left):
        return None
    if len({(memory.sent, memory.taken, memory.given_back, memory.kept) for memory in found}) > 1:
        return None
    last = found[-1]
    return replace(last, left=last.left + times * left, rise=last.rise + times * rise)


def _slope(values: Sequence[int]) -> int | None:
    """What each value adds to the one before; None if they add different amounts."""
    steps = {after - before for before, after in pairwise(values)}
    return steps.pop() if len(steps) == 1 else None
