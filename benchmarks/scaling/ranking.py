"""Orders all grids of a number of ranks by predicted seconds, without running any of them."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import product

from engine.errors import EngineError, first_line
from engine.planning.plan import Plan
from engine.planning.step_time.prediction import AxisLinks, Computation, StepTime, predict_step


@dataclass(frozen=True, slots=True, order=True, kw_only=True)
class GridChoice:
    """Sizes of a grid, with a ZeRO stage."""

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
    """Predicted cost of a grid, or the reason why it is impossible."""

    choice: GridChoice
    time: StepTime | None
    refused: str = ""


def grid_choices(world: int, stages: Iterable[int] = (0, 1)) -> tuple[GridChoice, ...]:
    """Returns all grids of ``world`` ranks; ZeRO only with several data ranks."""
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
    """Ranks all choices by predicted time, fastest first, then impossible ones in their given order.

    Args:
        plan_of: function that plans a choice, or raises an :class:`EngineError`.
        links_of: function that returns the links of a choice, see
            :func:`~engine.planning.step_time.prediction.place_axes`.
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
