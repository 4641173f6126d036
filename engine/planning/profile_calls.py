"""Seconds of a model's calls, measured before the run: each distinct call once, alone, on the device of the run.

    look      what each call of a unit is given
    group     calls of alike units with alike arguments share one measurement
    alone     a copy of that one unit with random content: all the memory that measuring takes
    time      forward | backward without the weight gradients that can wait (``weights``) | those

At most LIMIT_SECONDS: groups with the most FLOPs are measured first, and none is begun after that time; each has a
warm-up and up to 5 repeats within its share of what is left, of which the median counts. What was not measured, or
does not run alone, has its FLOPs times the mean seconds per FLOP of what was.
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
_LINKS: Mapping[str, tuple[float, float]] = MappingProxyType({"cuda": (20e-6, 100e9), "cpu": (200e-6, 1e9)})
"""Seconds until a message begins and bytes a second: a GPU to one of its node, a process to another by gloo.
Rough figures; a transfer is short beside a stage, or the stages are too small."""


@dataclass(frozen=True, slots=True)
class Costs:
    """What the calls of a model cost in a run; the same on every rank."""

    units: tuple[str, ...]
    """The unit of each call."""
    calls: tuple[MicrobatchCost, ...]
    measured: bool
    """False: FLOPs in place of seconds."""
    notes: tuple[str, ...] = ()
    device: str = ""
    """Kind of device it was measured on."""

    def transfer_seconds(self, count: float) -> float:
        """An estimate for ``count`` bytes to the next rank; 0 where nothing was measured, to compare with FLOPs."""
        latency, bytes_a_second = _LINKS.get(self.device, _LINKS["cpu"])
        return latency + count / bytes_a_second if self.measured else 0.0

    def to_bytes(self) -> bytes:
        """For other ranks; every number comes back as it was."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> "Costs":
        """What ``to_bytes`` gave."""
        read = json.loads(data)
        calls = tuple(MicrobatchCost(**call) for call in read["calls"])
        return cls(tuple(read["units"]), calls, read["measured"], tuple(read["notes"]), read["device"])

    def check(self, timeline: ModelTrace) -> None:
        """Refuse costs of other calls.

        Raises:
            PlanError: the calls of ``timeline`` are not those that were measured.
        """
        if self.units != tuple(call.unit for call in timeline.calls):
            raise PlanError(
                "this rank's model calls other units than the one that rank 0 measured; build the same model on every "
                "rank, and pass the same example_batch."
            )


def needs_profiling(config: Config) -> bool:
    """Whether the plan depends on measured seconds."""
    return config.pp > 1 and (config.parallel.balance == "time" or config.parallel.schedule == "auto")


def flop_costs_only(timeline: ModelTrace) -> Costs:
    """Costs without a measurement: FLOPs."""
    note = "no call was measured, so that FLOPs stand for seconds"
    return Costs(tuple(call.unit for call in timeline.calls), flop_costs(timeline), measured=False, notes=(note,))


def profile_run(program: Program, example: Batch, config: Config, stages: int, device: torch.device) -> Costs:
    """Measure the calls of one training microbatch on ``device``. Nothing is communicated, and nothing changed.

    ``stages``: as in the plan, so that both see the same calls.

    Raises:
        PlanError: the model cannot be followed.
    """
    material = Material()
    timeline = trace_example(program, example, stages, material=material)
    settings = config.activation_checkpointing
    partly, recomputed = selective_blocks(program.model, settings), recomputed_blocks(program.model, settings)
    selective = Selective(find_operators(settings))
    ways = {call.unit: selective for call in timeline.calls if _lies_in(call.unit, partly)}
    found = measure_calls(program.model, timeline, material, (program.precision, device), ways)
    calls = tuple(
        _recomputed(cost, values_bytes(timeline, index)) if _lies_in(call.unit, recomputed) else cost
        for index, (call, cost) in enumerate(zip(timeline.calls, found.calls, strict=True))
    )
    return replace(found, calls=calls)


def measure_calls(
    model: nn.Module,
    timeline: ModelTrace,
    material: Material,
    run: tuple[Precision, torch.device],
    ways: Mapping[str, Selective] = MappingProxyType({}),
) -> Costs:
    """Measure the calls of ``timeline``, with ``material`` from the same probe, as they run in ``run``.

    ``ways``: the units that are recomputed selectively; no other is recomputed.
    """
    _, device = run
    units = tuple(call.unit for call in timeline.calls)
    begun = perf_counter()
    with restoring_state(nn.Module(), device), keyed_generators(device, 0):
        measuring = _Measuring(model, timeline, run, ways)
        measuring.run(material.arguments)
    calls = _completed(timeline, measuring.measured)
    notes = _notes(measuring.failed, measuring.kinds, f"{device} in {perf_counter() - begun:.1f} s")
    if calls is None:
        notes = (*notes, "no call with FLOPs could be measured, so that FLOPs stand for seconds")
    kept = by_call(timeline, material.kept_by_glue)
    costs = [
        replace(cost, kept_bytes=cost.kept_bytes + kept.get(index, 0))
        for index, cost in enumerate(calls or flop_costs(timeline))
    ]
    return Costs(units, tuple(costs), calls is not None, notes, device.type)


class _Measuring:
    """The groups of alike calls, one after the other."""

    def __init__(
        self,
        model: nn.Module,
        timeline: ModelTrace,
        run: tuple[Precision, torch.device],
        ways: Mapping[str, Selective],
    ) -> None:
        self.measured: dict[int, MicrobatchCost] = {}
        self.failed: dict[str, str] = {}
        """By unit: why it was not measured."""
        self.kinds = 0
        self._model, self._timeline, self._run, self._ways = model, timeline, run, ways

    def run(self, given: Sequence[Arguments]) -> None:
        """Measure as many as the time allows."""
        calls = self._timeline.calls
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
            raise PlanError(f"{LIMIT_SECONDS:g} s were over")
        if reads_elsewhere(self._model, call, given):
            raise PlanError("it reads what is not its own")
        with closing(IsolatedBlock(self._model, call.unit, *self._run, self._ways.get(call.unit))) as alone:
            return _measure(alone, given, seconds)


def _measure(alone: IsolatedBlock, given: Arguments, seconds: float) -> MicrobatchCost:
    begun = perf_counter()
    warm, size = alone.weigh(given)  # its time counts only where that was all there is
    runs: list[Seconds] = []
    while len(runs) < _REPEATS and perf_counter() - begun < seconds:
        runs.append(alone.time(given))
    forward, inputs, weights = (median(parts) for parts in zip(*(runs or [warm]), strict=True))
    return MicrobatchCost(forward, inputs, weights, size.kept, size.left)


def _completed(timeline: ModelTrace, measured: Mapping[int, MicrobatchCost]) -> tuple[MicrobatchCost, ...] | None:
    """With FLOPs at the mean speed of what was measured, for the calls that were not, and for glue."""
    flops = sum(timeline.calls[index].flops for index in measured)
    if not flops:
        return None
    known = measured.values()
    forward = sum(cost.forward_seconds for cost in known) / flops
    inputs = sum(cost.input_seconds for cost in known) / flops
    weights = sum(cost.weight_seconds for cost in known) / flops
    shapes, glue = flop_costs(timeline), glue_flops(timeline)
    calls = []
    for index, call in enumerate(timeline.calls):
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
    """With its forward once more in backward, and only what it was given kept."""
    return replace(cost, input_seconds=cost.input_seconds + cost.forward_seconds, kept_bytes=inputs)


def _lies_in(unit: str, blocks: Iterable[str]) -> bool:
    return any(is_inside(unit, block) for block in blocks)
