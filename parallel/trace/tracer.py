"""Traces one forward of a model on meta tensors, without computing it.

Nothing is computed that takes memory: values are expanded tensors, and shapes come from their meta twins. If the trace
shows that a unit hides something, the unit is opened into its children and the forward is traced again:

    a unit leaks (a tensor that it made and did not return is read elsewhere)    all units of its class are opened
    a unit is never called, but its inside is used                               the unit is opened
"""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import replace
from enum import Enum, auto
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from engine.errors import PlanError, first_line
from engine.parallel.model.blocks import Units, find_units, open_units, weighty_children
from engine.parallel.model.forward_patch import ForwardPatches, Interception, PatchLayer
from engine.parallel.model.name_patterns import is_inside
from engine.parallel.model.rng_streams import HostState, host_extreme
from engine.parallel.model.side_effects import restoring_state
from engine.parallel.model.torch_checkpoint import open_checkpoints
from engine.parallel.model.user_code import is_own_mistake
from engine.parallel.trace.model_trace import Call, Material, ModelTrace, OnZeros, Recipe, trace_difference
from engine.parallel.trace.provenance import UncutPath, UncutPathError
from engine.parallel.trace.recorder import Recorder
from engine.parallel.trace.torch_function import functions_shown_to

ModelCall = Callable[[], Any]


class _Shapes(Enum):
    ONES = auto()
    """Tensors whose shapes depend on content have the shapes that ones give, not those that zeros give."""


_Extreme = float | HostState | _Shapes
"""Number that every draw gives, state of the host's generators, or content."""
_EXTREMES: tuple[_Extreme, ...] = (0.0, 1.0 - 2.0**-24)
"""The extremes of a uniform draw: any comparison with a probability differs between the two."""


def trace_model(
    model: nn.Module,
    program: ModelCall,
    units: Units | None = None,
    stages: int = 1,
    device: torch.device | None = None,
    material: Material | None = None,
) -> ModelTrace:
    """Runs ``program``, the forward and loss of ``model``, without data, and returns the trace. The model, its modes
    and the random streams do not change.

    Args:
        units: modules to record as one call each; default: the units of ``find_units``, divided further as ``stages``
            require.
        stages: number of pipeline stages. If the model has fewer blocks, ModuleLists and Sequentials inside blocks are
            divided too. If blocks are still too few, lists of modules of different classes are divided as well.
        device: device of the tensors that the model's code sees; default: the parameters' device, or the CPU if all are
            on meta.
        material: object that receives arguments and memory of the calls, for measurements.

    Raises:
        PlanError: the program does something between units that no stage can do alone; the message names it.
    """
    if device is None:
        devices = (parameter.device for parameter in model.parameters() if not parameter.is_meta)
        device = next(devices, torch.device("cpu"))
    found = units or find_units(model)
    try:
        trace = _trace_opened(model, program, found, device, material)
    except UncutPathError:  # it may be code of a block, whose lists (experts) were taken for blocks
        whole = find_units(model, mixed=True)
        if units is not None or whole.modules.keys() == found.modules.keys():
            raise
        found, trace = whole, _trace_opened(model, program, whole, device, material)
    for mixed in (False, True) if units is None else ():
        more = find_units(model, deep=True, mixed=mixed)
        too_few = sum(call.unit in trace.blocks for call in trace.calls) < stages
        if too_few and len(more.blocks) > len(found.blocks):
            found, trace = more, _trace_opened(model, program, more, device, material)
    return trace


def _trace_opened(
    model: nn.Module,
    program: ModelCall,
    units: Units,
    device: torch.device,
    material: Material | None = None,
    extreme: _Extreme | None = None,
) -> ModelTrace:
    original = units
    while True:
        recorder, result, host = _run(model, program, units, device, material, extreme)
        hiding = [name for name in _hiding(recorder, units) if weighty_children(units.modules[name])]
        if not hiding:
            break
        units = open_units(units, hiding)
    problems = [*recorder.provenance.problems, *recorder.provenance.leaks.values()]
    trace = ModelTrace(
        values=tuple(recorder.provenance.values),
        calls=tuple(_mark_starts(recorder.calls, units)),
        glue=tuple(recorder.glue),
        units=tuple(units.modules),
        blocks=units.blocks,
        parameter_bytes=MappingProxyType(
            {name: parameter.numel() * parameter.element_size() for name, parameter in model.named_parameters()}
        ),
        buffers=tuple(name for name, _ in model.named_buffers()),
        result=result,
        random=recorder.meter.draws,
        host_random=host,
        reads_batch=recorder.reads_batch,
        on_zeros=recorder.on_zeros,
    )
    if problems:
        one_path = all(isinstance(problem, UncutPath) for problem in problems)
        raise _error_of(problems[0], trace if one_path else None)
    if extreme is None:
        _check_paths(
            trace, recorder, host, lambda extreme: _trace_opened(model, program, original, device, None, extreme)
        )
    return trace


def _check_paths(trace: ModelTrace, recorder: Recorder, host: bool, again: Callable[[_Extreme], ModelTrace]) -> None:
    """Traces ``again`` with the extremes of what code between units has read, and raises if the forward takes another
    path. ``host``: the program has drawn on the host.
    """
    reads = [(recorder.random_read, extreme) for extreme in _EXTREMES if recorder.random_read is not None]
    reads += [("the model", extreme) for extreme in (host_extreme(False), host_extreme(True)) if host]
    for place, extreme in reads:
        what = trace_difference(trace, again(extreme))
        if what is not None:
            cause, remedy = "a random number", "switch that off (layerdrop 0), or move it into a block that returns"
            raise _other_path(trace, place, cause, what, f"{remedy} a new tensor on every path.")
    if recorder.shape_read is None:
        return
    try:
        what = trace_difference(trace, again(_Shapes.ONES), path_only=True)
    except PlanError:  # ones may be no legal content, such as an index beyond the end
        return
    if what is not None:
        cause = "a shape that depends on content"
        raise _other_path(trace, recorder.shape_read, cause, what, "move it into a block with all that it chooses.")


def _other_path(trace: ModelTrace, place: str, cause: str, difference: str, remedy: str) -> UncutPathError:
    chooses = f"{place} chooses the path of the forward by {cause}"
    sentence = f"{chooses}: with another one it {difference}, but a pipeline is cut for one path; {remedy}"
    return UncutPathError(UncutPath(sentence, f"{chooses}, but a forward on shapes shows one path"), trace)


def _error_of(problem: str | UncutPath, trace: ModelTrace | None = None) -> PlanError:
    return PlanError(problem) if isinstance(problem, str) else UncutPathError(problem, trace)


def _run(
    model: nn.Module,
    program: ModelCall,
    units: Units,
    device: torch.device,
    material: Material | None,
    extreme: _Extreme | None,
) -> tuple[Recorder, Recipe, bool]:
    """Returns the recorder, the program's result, and True if the program has drawn on the host."""
    if material is not None:
        material.clear()
    drawn = extreme if isinstance(extreme, float) else None
    recorder = Recorder(model, units, device, material, drawn, ones=extreme is _Shapes.ONES)
    with ExitStack() as stack:
        stack.enter_context(restoring_state(model, device))
        if isinstance(extreme, HostState):
            extreme.put()
        before = HostState.take()
        for module in model.modules():
            if module._compiled_call_impl is not None:
                object.__setattr__(module, "_compiled_call_impl", None)
        patches = ForwardPatches()
        stack.callback(patches.remove)
        interception = Interception(handler=recorder.call, layer=PatchLayer.STAGE, patches=patches)
        for name, module in units.modules.items():
            interception.install(name, module, "is traced")
        stack.enter_context(open_checkpoints(recompute=False))
        stack.enter_context(functions_shown_to(recorder.show))
        stack.enter_context(recorder.meter)
        stack.enter_context(recorder)
        try:
            result = program()
        except Exception as error:
            if recorder.provenance.problems:  # the error may follow from zeros that the program read on the host
                raise _error_of(recorder.provenance.problems[0]) from error
            if recorder.on_zeros and not is_own_mistake(error):
                raise PlanError(_fails_on_zeros(recorder.on_zeros[-1], error)) from error
            raise
        host = not before.is_present()
    return recorder, recorder.finish(result), host


def _fails_on_zeros(read: OnZeros, error: Exception) -> str:
    return (
        "the engine traces the model with tensors of zeros, but the model reads the content of a tensor "
        f"({read.operation} {read.where}) and fails on zeros ({first_line(error)}); compute from shapes there, or "
        "set parallel.tensor, parallel.pipeline and parallel.context to 1, which needs no trace."
    )


def _hiding(recorder: Recorder, units: Units) -> Iterable[str]:
    """Units to open: all units of a class of which one leaks, and units that are used without being called."""
    leaking = {type(units.modules[name]) for name in recorder.provenance.leaks}
    called = {call.unit for call in recorder.calls}
    for name, module in units.modules.items():
        if type(module) in leaking or (name not in called and recorder.used_by_glue(module)):
            yield name


def _mark_starts(calls: list[Call], units: Units) -> list[Call]:
    """Marks the calls at which a stage may start: calls of blocks, and the first call inside an opened block."""
    of_block = set(units.blocks)
    marked: list[Call] = []
    last: str | None = None
    seen: set[str] = set()
    for call in calls:
        block = next((name for name in units.whole_blocks if is_inside(call.unit, name)), None)
        block = block if call.unit in of_block else None
        starts = block is not None and (block == call.unit or block != last or call.unit in seen)
        if starts:
            seen = set()
        seen.add(call.unit)
        last = block
        marked.append(replace(call, starts_block=starts))
    return marked
