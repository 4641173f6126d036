"""What the calls of a timeline cost, and what follows for the stages of a cut.

The seconds of a call are measured where it will run (``engine.planning.profile_calls``). Without a measurement its
FLOPs stand for them, as many for each of the three parts: a matrix product is done once forward, once for the gradient
of its input and once for that of its weight.

Glue is not measured: its FLOPs, and what it saves for its backward, count for the call before it.
"""

from collections.abc import Sequence

from engine.parallel.pipeline.partition.auto_schedule import MicrobatchCost
from engine.parallel.trace.model_trace import ModelTrace


def flops_of_calls(timeline: ModelTrace) -> list[int]:
    """FLOPs of the forward of each call and of the glue behind it; at least 1, so that many free calls count too."""
    flops = [call.flops + 1 for call in timeline.calls]
    for index, extra in glue_flops(timeline).items():
        flops[index] += extra
    return flops


def glue_flops(timeline: ModelTrace) -> dict[int, int]:
    """FLOPs of glue by the call that it counts for."""
    return by_call(timeline, [glue.flops for glue in timeline.glue])


def by_call(timeline: ModelTrace, of_glue: Sequence[int]) -> dict[int, int]:
    """A number for each glue operation, summed by the call that it counts for."""
    found: dict[int, int] = {}
    for glue, number in zip(timeline.glue, of_glue, strict=True) if timeline.calls else ():
        index = max(glue.calls_before - 1, 0)
        found[index] = found.get(index, 0) + number
    return found


def flop_costs(timeline: ModelTrace) -> tuple[MicrobatchCost, ...]:
    """Costs from shapes alone: FLOPs in place of seconds, and as kept bytes the values that a call reads and makes."""
    made: dict[int, int] = {}
    for value in timeline.values:
        if value.maker == "call":
            made[value.index] = made.get(value.index, 0) + value.bytes
    return tuple(
        MicrobatchCost(flops, flops, flops, kept, kept)
        for index, flops in enumerate(flops_of_calls(timeline))
        for kept in [made.get(index, 0) + values_bytes(timeline, index)]
    )


def values_bytes(timeline: ModelTrace, call: int) -> int:
    """Bytes of the values that a call reads."""
    return sum(timeline.values[number].bytes for number in timeline.calls[call].inputs)


def stage_costs(stage_of_call: Sequence[int], costs: Sequence[MicrobatchCost]) -> tuple[MicrobatchCost, ...]:
    """What each stage of a cut costs: the sum over its calls."""
    stages: list[list[MicrobatchCost]] = [[] for _ in range(max(stage_of_call, default=0) + 1)]
    for stage, cost in zip(stage_of_call, costs, strict=True):
        stages[stage].append(cost)
    return tuple(map(MicrobatchCost.total, stages))
