"""Live bytes of a long model from short ones: each further period of equal blocks adds the same bytes.

    blocks    | first | A A | last      dry run with 2, 3 and 4 periods
              | first | A A A | last
              | first | A A A A | last
    model     | first | A A A A A A .. A | last      extrapolated, if the three are on a line

Live bytes after an action are linear in the number of periods. Its peak is the maximum of a constant and a line with
the same slope, so the extrapolation is exact once the peak grows by that slope or is constant. Buckets have to repeat
as blocks do.
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
"""Numbers of periods in the short models."""

PlanOf = Callable[[nn.Module], Plan]
"""Function that plans a model with fewer blocks under the same configuration."""


def shortened_step(
    model: nn.Module, plan: Plan, run_dry: Callable[[nn.Module, Plan], DryRunStep], plan_of: PlanOf
) -> DryRunStep | None:
    """Returns the live bytes of each action in a training step of ``model``, extrapolated from three copies with fewer
    blocks.

    Returns None if the plan has a pipeline, ``model`` has too few equal blocks, or the bytes may not grow linearly with
    their number.

    Args:
        run_dry: callback that makes a dry run of a model under a plan, and returns the live bytes.
        plan_of: callback that plans a model with fewer blocks.
    """
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
    except (EngineError, IndexError):  # code that requires the whole model's number of blocks
        return None
    return continued(steps, run.periods)


def shorten(model: nn.Module, run: AlikeRun, periods: int) -> nn.Module:
    """Returns a copy of ``model`` in which the pattern ``run`` of blocks repeats only ``periods`` times."""
    short = deepcopy(model)
    blocks = short.get_submodule(run.blocks)
    if isinstance(blocks, nn.ModuleList | nn.Sequential):
        del blocks[run.start + periods * run.period :]
    return short


def _is_even(plan: Plan) -> bool:
    """Returns True if all blocks are treated equally: nothing counts blocks, or fills a budget with the first ones."""
    settings = plan.config.activation_checkpointing
    return plan.config.pp == 1 and settings.every is None and settings.mode != "offload" and not plan.hosted(_FIRST)


_FIRST = Coord()


def _pinned(plan: Plan) -> int:
    """Returns the number of pinned buckets; their limit is in bytes, so it does not grow with the number of blocks."""
    gathers = plan.gathers(_FIRST)
    return 0 if gathers is None else len(gathers.pinned)


def _buckets(model: nn.Module, plan: Plan) -> Counter[Hashable]:
    """Counts equal buckets, ignoring the position of their blocks; for deferred buckets it counts elements."""
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
    """Returns True if each period adds the same buckets, and their total equals the buckets of the whole model."""
    last = layouts[-1]
    for kind in whole.keys() | last.keys():
        more = _slope([layout[kind] for layout in layouts])
        if more is None or last[kind] + (periods - PERIODS[-1]) * more != whole[kind]:
            return False
    return True


def continued(steps: Sequence[DryRunStep], periods: int) -> DryRunStep | None:
    """Returns the live bytes of a model with ``periods`` repetitions of a pattern of blocks, extrapolated linearly;
    None if the bytes do not grow linearly.

    Args:
        steps: live bytes of the same model with 2, 3 and 4 repetitions.
    """
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
    """Returns the difference between consecutive values; None if it is not constant."""
    steps = {after - before for before, after in pairwise(values)}
    return steps.pop() if len(steps) == 1 else None
