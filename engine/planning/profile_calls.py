"""Profiling before the run: seconds of each distinct module call, in isolation, on the device of the run.

    trace     record the arguments of each module call
    group     calls of equal modules with equal argument shapes share one measurement
    isolate   copy the module with random weights
    time      forward, backward without deferrable weight gradients, and those weight gradients

Profiling takes about LIMIT_SECONDS, groups with the most FLOPs first: a warm-up and the median of up to 5 repeats.
Calls that were not measured cost their FLOPs times the mean seconds per FLOP.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from statistics import median
from time import perf_counter
from types import MappingProxyType

import torch
from torch import nn

from engine.config import Config
from engine.errors import PlanError, first_line
from engine.kernels.device import expected_link
from engine.parallel.activation_checkpointing.blocks import find_operators, recomputed_blocks, selective_blocks
from engine.parallel.activation_checkpointing.selective import Selective
from engine.parallel.model.name_patterns import is_inside
from engine.parallel.model.rng_streams import keyed_generators
from engine.parallel.model.side_effects import restoring_state
from engine.parallel.model.user_code import is_own_mistake
from engine.parallel.pipeline.partition.auto_schedule import MicrobatchCost
from engine.parallel.pipeline.partition.cost_model import by_call, flop_costs, glue_flops, values_bytes
from engine.parallel.trace.model_trace import Arguments, Call, Material, ModelTrace
from engine.planning.example_trace import trace_example
from engine.planning.isolated_block import IsolatedBlock, Seconds, reads_elsewhere, signatures
from engine.precision.dtypes import Precision
from engine.program.batch import Batch
from engine.program.program import Program

LIMIT_SECONDS = 3.0
_REPEATS = 5


class _UnmeasuredError(Exception):
    """Why a call is not timed; a note says it."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Measured seconds or counted FLOPs of the module calls of one microbatch."""

    units: tuple[str, ...]
    """Module name of each call."""
    calls: tuple[MicrobatchCost, ...]
    measured: bool
    """True if costs are seconds, False if they are FLOPs."""
    notes: tuple[str, ...] = ()
    device: str = ""
    """Type of the measured device; empty if none was measured."""

    def transfer_seconds(self, count: float) -> float:
        """Returns the estimated seconds to send ``count`` bytes to the next pipeline rank; 0 if these costs are not
        measured.
        """
        latency, bytes_a_second = expected_link(self.device)
        return latency + count / bytes_a_second if self.measured else 0.0

    def to_bytes(self) -> bytes:
        """Returns the costs as JSON bytes for other ranks, without loss of precision."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> "Costs":
        """Returns the costs from ``data``, which :meth:`to_bytes` has made."""
        read = json.loads(data)
        calls = tuple(MicrobatchCost(**call) for call in read["calls"])
        return cls(tuple(read["units"]), calls, read["measured"], tuple(read["notes"]), read["device"])

    def check(self, trace: ModelTrace) -> None:
        """Checks that these costs belong to the module calls of ``trace``.

        Raises:
            PlanError: ``trace`` calls other modules.
        """
        if self.units != tuple(call.unit for call in trace.calls):
            raise PlanError(
                "the model on this rank calls other modules than the model on rank 0; build the same model on every "
                "rank, and pass the same example_batch."
            )


def needs_profiling(config: Config) -> bool:
    """Returns True if the plan needs measured seconds, to balance stages by time or for schedule "auto"."""
    return config.pp > 1 and (config.parallel.balance == "time" or config.parallel.schedule == "auto")


def flop_costs_only(trace: ModelTrace) -> Costs:
    """Returns the costs of the module calls of ``trace`` as FLOPs; measures nothing."""
    note = "no call was measured, so that FLOPs stand for seconds"
    return Costs(tuple(call.unit for call in trace.calls), flop_costs(trace), measured=False, notes=(note,))


def profile_run(program: Program, example: Batch, config: Config, stages: int, device: torch.device) -> Costs:
    """Measures time and memory of each module call of one training microbatch on ``device``.

    Communicates nothing, and leaves the model unchanged. ``stages``: number of pipeline stages; if the model has fewer
    blocks, parts of blocks count as calls.

    Raises:
        PlanError: the model cannot be traced.
    """
    material = Material()
    trace = trace_example(program, example, stages, material=material, split=config.parallel.split)
    settings = config.activation_checkpointing
    partly, recomputed = selective_blocks(program.model, settings), recomputed_blocks(program.model, settings)
    selective = Selective(find_operators(settings))
    ways = {call.unit: selective for call in trace.calls if _lies_in(call.unit, partly)}
    found = measure_calls(program.model, trace, material, (program.precision, device), ways)
    calls = tuple(
        _recomputed(cost, values_bytes(trace, index)) if _lies_in(call.unit, recomputed) else cost
        for index, (call, cost) in enumerate(zip(trace.calls, found.calls, strict=True))
    )
    return replace(found, calls=calls)


def measure_calls(
    model: nn.Module,
    trace: ModelTrace,
    material: Material,
    run: tuple[Precision, torch.device],
    ways: Mapping[str, Selective] = MappingProxyType({}),
) -> Costs:
    """Measures copies of the modules that ``trace`` calls, and returns seconds and memory of each call; FLOPs instead
    of seconds if nothing could be measured.

    ``material``: recorded arguments of the calls. ``run``: (precision, device). ``ways``: rules of selective
    recomputation by module name.
    """
    _, device = run
    units = tuple(call.unit for call in trace.calls)
    begun = perf_counter()
    with restoring_state(nn.Module(), device), keyed_generators(device, 0):
        measuring = _Measuring(model, trace, run, ways)
        measuring.run(material.arguments)
    calls = _completed(trace, measuring.measured)
    notes = _notes(measuring.failed, measuring.kinds, f"{device} in {perf_counter() - begun:.1f} s")
    if calls is None:
        notes = (*notes, "no call with FLOPs could be measured, so that FLOPs stand for seconds")
    kept = by_call(trace, material.kept_by_glue)
    costs = [
        replace(cost, kept_bytes=cost.kept_bytes + kept.get(index, 0))
        for index, cost in enumerate(calls or flop_costs(trace))
    ]
    return Costs(units, tuple(costs), calls is not None, notes, device.type)


class _Measuring:
    """Measures the groups of equal calls, one after the other."""

    def __init__(
        self,
        model: nn.Module,
        trace: ModelTrace,
        run: tuple[Precision, torch.device],
        ways: Mapping[str, Selective],
    ) -> None:
        self.measured: dict[int, MicrobatchCost] = {}
        self.failed: dict[str, str] = {}
        """Reason why a unit was not measured, by name of the unit."""
        self.kinds = 0
        self._model, self._trace, self._run, self._ways = model, trace, run, ways

    def run(self, given: Sequence[Arguments]) -> None:
        """Measures as many groups as the time allows."""
        calls = self._trace.calls
        groups: dict[object, list[int]] = {}
        for index, signature in enumerate(signatures(self._model, [call.unit for call in calls], given)):
            groups.setdefault(signature, []).append(index)
        end = perf_counter() + LIMIT_SECONDS
        members = sorted(groups.values(), key=lambda group: -sum(calls[index].flops for index in group))
        for number, group in enumerate(members):
            call, left = calls[group[0]], end - perf_counter()
            try:
                cost = self._measure(call, given[group[0]], left / (len(members) - number))
            except Exception as error:  # the unit's own code may raise anything outside its model; a note says it
                if is_own_mistake(error):
                    raise
                self.failed[call.unit] = first_line(error)
            else:
                self.measured |= dict.fromkeys(group, cost)
                self.kinds += 1

    def _measure(self, call: Call, given: Arguments, seconds: float) -> MicrobatchCost:
        if seconds <= 0:
            raise _UnmeasuredError(f"{LIMIT_SECONDS:g} s were over")
        if reads_elsewhere(self._model, call, given):
            raise _UnmeasuredError("it reads what is not its own")
        with closing(IsolatedBlock(self._model, call.unit, *self._run, self._ways.get(call.unit))) as alone:
            return _measure(alone, given, seconds)


def _measure(alone: IsolatedBlock, given: Arguments, seconds: float) -> MicrobatchCost:
    begun = perf_counter()
    warm, size = alone.weigh(given)  # the warm-up; its time counts only if there was none for a repeat
    runs: list[Seconds] = []
    while len(runs) < _REPEATS and perf_counter() - begun < seconds:
        runs.append(alone.time(given))
    forward, inputs, weights = (median(parts) for parts in zip(*(runs or [warm]), strict=True))
    return MicrobatchCost(forward, inputs, weights, size.kept, size.left)


def _completed(trace: ModelTrace, measured: Mapping[int, MicrobatchCost]) -> tuple[MicrobatchCost, ...] | None:
    """Adds estimates for glue and for unmeasured calls: their FLOPs at the mean speed of the measured calls."""
    flops = sum(trace.calls[index].flops for index in measured)
    if not flops:
        return None
    known = measured.values()
    forward = sum(cost.forward_seconds for cost in known) / flops
    inputs = sum(cost.input_seconds for cost in known) / flops
    weights = sum(cost.weight_seconds for cost in known) / flops
    shapes, glue = flop_costs(trace), glue_flops(trace)
    calls = []
    for index, call in enumerate(trace.calls):
        cost = measured.get(index, replace(shapes[index], forward_seconds=0.0, input_seconds=0.0, weight_seconds=0.0))
        extra = glue.get(index, 0) + (0 if index in measured else call.flops + 1)
        calls.append(
            replace(
                cost,
                forward_seconds=cost.forward_seconds + extra * forward,
                input_seconds=cost.input_seconds + extra * inputs,
                weight_seconds=cost.weight_seconds + extra * weights,
            )
        )
    return tuple(calls)


def _notes(failed: Mapping[str, str], kinds: int, where: str) -> tuple[str, ...]:
    notes = [f"measured {kinds} kinds of calls on {where}"]
    if failed:
        unit, why = next(iter(failed.items()))
        more = f" and {len(failed) - 1} more" * (len(failed) > 1)
        notes.append(f"not measured, so that its FLOPs count at the mean speed: {unit} ({why}){more}")
    return tuple(notes)


def _recomputed(cost: MicrobatchCost, inputs: int) -> MicrobatchCost:
    """Returns the cost under full recomputation: backward repeats the forward, and only the inputs are kept."""
    return replace(cost, input_seconds=cost.input_seconds + cost.forward_seconds, kept_bytes=inputs)


def _lies_in(unit: str, blocks: Iterable[str]) -> bool:
    return any(is_inside(unit, block) for block in blocks)
