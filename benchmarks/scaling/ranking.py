"""All grids of a number of ranks, the fastest first, before any of them is run. Pure, but for making the plans."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import product

from engine.errors import EngineError, first_line
from engine.planning.plan import Plan
from engine.planning.step_time.prediction import AxisLinks, Computation, StepTime, predict_step


@dataclass(frozen=True, slots=True, order=True, kw_only=True)
class GridChoice:
    """A grid and a ZeRO stage."""

    dp: int
    tp: int
    pp: int
    stage: int = 0

    def __str__(self) -> str:
        named = (("dp", self.dp), ("tp", self.tp), ("pp", self.pp))
        grid = " x ".join(f"{axis}{size}" for axis, size in named if size > 1) or "1 rank"
        return grid + f", ZeRO {self.stage}" * (self.stage > 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedGrid:
    """What a grid would cost, or why it cannot be."""

    choice: GridChoice
    time: StepTime | None
    refused: str = ""


def grid_choices(world: int, stages: Iterable[int] = (0, 1)) -> tuple[GridChoice, ...]:
    """Every way to share ``world`` ranks among the axes; ZeRO only where there are several data ranks."""
    sizes = [size for size in range(1, world + 1) if world % size == 0]
    return tuple(
        GridChoice(dp=dp, tp=tp, pp=world // (dp * tp), stage=stage)
        for dp, tp in product(sizes, sizes)
        if world % (dp * tp) == 0
        for stage in (sorted(set(stages)) if dp > 1 else (0,))
    )


def rank_grids(
    choices: Iterable[GridChoice],
    plan_of: Callable[[GridChoice], Plan],
    links_of: Callable[[GridChoice], AxisLinks],
    computation: Computation,
) -> tuple[RankedGrid, ...]:
    """All choices, the fastest first, then those that cannot be, in the order given.

    Args:
        plan_of: makes the plan of a choice, or raises an :class:`EngineError` that says why there is none.
        links_of: the links of its grid, see :func:`~engine.planning.step_time.prediction.place_axes`.
    """
    fit, unfit = list[tuple[float, RankedGrid]](), list[RankedGrid]()
    for choice in choices:
        try:
            plan = plan_of(choice)
        except EngineError as error:
            unfit.append(RankedGrid(choice=choice, time=None, refused=first_line(error)))
            continue
        time = predict_step(plan, computation, links_of(choice))
        fit.append((time.total, RankedGrid(choice=choice, time=time)))
    return (*(ranked for _, ranked in sorted(fit, key=lambda pair: pair[0])), *unfit)
