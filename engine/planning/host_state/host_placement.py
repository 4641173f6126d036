"""What a plan decides about state in host memory: the smallest part of it that fits."""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from engine.config import Config
from engine.errors import PlanError
from engine.zero.layout import FlatLayout


def possible_ratios(layouts: Iterable[FlatLayout]) -> tuple[float, ...]:
    """The ratios at which one more bucket of some layout moves to the host, ascending; any other one acts as the next.

    Each is the largest number for which no further bucket moves.
    """
    found = {0.0, 1.0}
    for layout in layouts:
        elements = 0
        for bucket in layout.buckets:
            elements += bucket.elements
            ratio = min(1.0, elements / layout.elements)
            while ratio * layout.elements > elements:  # the quotient was rounded up
                ratio = math.nextafter(ratio, 0.0)
            while (above := math.nextafter(ratio, 1.0)) > ratio and above * layout.elements <= elements:
                ratio = above
            found.add(ratio)
    return tuple(sorted(found))


def smallest_ratio(layouts: Iterable[FlatLayout], fits: Callable[[float], bool]) -> float | None:
    """The smallest possible ratio that fits, as all larger ones do then; None: not even all of the state."""
    ratios = possible_ratios(layouts)
    first = bisect_left(ratios, True, key=fits)
    return ratios[first] if first < len(ratios) else None


def with_ratio(config: Config, ratio: float) -> Config:
    """``config`` with a number as the part of the optimizer state that the host has."""
    zero = config.zero_optimization
    return replace(
        config, zero_optimization=replace(zero, offload_optimizer=replace(zero.offload_optimizer, ratio=ratio))
    )


def refuse_limit(limit: float, rank: int, state: Mapping[str, int]) -> PlanError:
    """Why no part of the state is enough; ``state``: bytes on the device of ``rank``, by kind, without it."""
    kinds = ", ".join(f"{kind} {count / 2**30:.3g}" for kind, count in state.items() if count)
    return PlanError(
        f"zero_optimization.offload_optimizer.memory_limit {limit:g} GiB: with all optimizer state on the host, rank "
        f"{rank} still holds {sum(state.values()) / 2**30:.3g} GiB on its device ({kinds}); raise the limit, take more "
        "data ranks or a higher stage, or put parameters on the host too (offload_param)."
    )


def refuse_unknown() -> PlanError:
    """Why there is no part by itself of a state that no plan can count."""
    return PlanError(
        'zero_optimization.offload_optimizer.ratio "auto" with an optimizer passed in code, whose state is not '
        "known before it is made; give a number from 0 to 1, or name the optimizer in the config."
    )
