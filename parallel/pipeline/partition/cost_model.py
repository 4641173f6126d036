"""Cost of the calls of a trace, and of the stages of a partition.

The seconds of a call are measured on the device of the run (``engine.planning.profile_calls``). Without a measurement,
FLOPs replace them, with one number for forward, input gradient and weight gradient: each computes one matrix product of
the same size.

Glue is not measured: its FLOPs, and the tensors that it saves for backward, count for the call before it.
"""

from collections.abc import Sequence

from engine.parallel.pipeline.partition.auto_schedule import MicrobatchCost
from engine.parallel.trace.model_trace import ModelTrace


def flops_of_calls(trace: ModelTrace) -> list[int]:
    """Returns one number per module call: 1 plus the forward FLOPs of the call and of the operations up to the next
    call.
    """
    flops = [call.flops + 1 for call in trace.calls]
    for index, extra in glue_flops(trace).items():
        flops[index] += extra
    return flops


def glue_flops(trace: ModelTrace) -> dict[int, int]:
    """Returns the FLOPs of operations between module calls, summed by index of the call before them.

    Operations before the first call count for call 0.
    """
    return by_call(trace, [glue.flops for glue in trace.glue])


def by_call(trace: ModelTrace, of_glue: Sequence[int]) -> dict[int, int]:
    """Sums ``of_glue``, a value per operation between module calls, by index of the call before the operation.

    Operations before the first call count for call 0.
    """
    found: dict[int, int] = {}
    for glue, number in zip(trace.glue, of_glue, strict=True) if trace.calls else ():
        index = max(glue.calls_before - 1, 0)
        found[index] = found.get(index, 0) + number
    return found


def flop_costs(trace: ModelTrace) -> tuple[MicrobatchCost, ...]:
    """Estimates the cost of each module call from shapes alone, with FLOPs in place of seconds.

    The bytes saved for backward are estimated as the bytes of the call's inputs and outputs.
    """
    made: dict[int, int] = {}
    for value in trace.values:
        if value.maker == "call":
            made[value.index] = made.get(value.index, 0) + value.bytes
    return tuple(
        MicrobatchCost(flops, flops, flops, kept, kept)
        for index, flops in enumerate(flops_of_calls(trace))
        for kept in [made.get(index, 0) + values_bytes(trace, index)]
    )


def values_bytes(trace: ModelTrace, call: int) -> int:
    """Returns the bytes of all inputs of the module call with index ``call``."""
    return sum(trace.values[number].bytes for number in trace.calls[call].inputs)


def stage_costs(stage_of_call: Sequence[int], costs: Sequence[MicrobatchCost]) -> tuple[MicrobatchCost, ...]:
    """Returns the cost of each stage, the sum of ``costs`` over its calls. ``stage_of_call``: stage of each call."""
    stages: list[list[MicrobatchCost]] = [[] for _ in range(max(stage_of_call, default=0) + 1)]
    for stage, cost in zip(stage_of_call, costs, strict=True):
        stages[stage].append(cost)
    return tuple(map(MicrobatchCost.total, stages))
