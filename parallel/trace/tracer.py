"""One forward without content, from which the timeline of a model is read.

Nothing is computed that takes memory: values are expanded tensors, shapes come from meta twins. Where that shows that
a unit hides something from the cut, the unit is opened and the forward is run again:

    a unit leaks (what it made is read elsewhere without having been returned)    all units of its class are opened
    a unit is never called, but what is inside it is used                         it is opened
"""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from engine.errors import PlanError
from engine.parallel.model.blocks import Units, find_units, open_units, weighty_children
from engine.parallel.model.forward_patch import ForwardPatches, Interception, PatchLayer
from engine.parallel.model.name_patterns import is_inside
from engine.parallel.model.side_effects import restoring_state
from engine.parallel.model.torch_checkpoint import open_checkpoints
from engine.parallel.trace.model_trace import Call, Material, ModelTrace, Recipe, trace_difference
from engine.parallel.trace.recorder import Recorder
from engine.parallel.trace.torch_function import functions_shown_to

ModelCall = Callable[[], Any]

_EXTREMES = (0.0, 1.0 - 2.0**-24)
"""Of what a uniform draw can give: every probability decides otherwise for one than for the other."""


def trace_model(
    model: nn.Module,
    program: ModelCall,
    units: Units | None = None,
    stages: int = 1,
    device: torch.device | None = None,
    material: Material | None = None,
) -> ModelTrace:
    """The timeline of ``program``, which runs forward and loss of ``model`` and returns a pytree.

    Every tensor in what it returns that depends on a parameter is a target. ``stages``: descend into chains inside
    chains, then into every Sequential, when the outer ones have fewer blocks. ``device``: what values say they are on;
    default: the device of the parameters, or the CPU where those are on meta. ``material`` is filled. Changes nothing
    in the model, its modes and the random streams.

    Raises:
        PlanError: the program does something between units that no stage can do alone; the message names it.
    """
    if device is None:
        devices = (parameter.device for parameter in model.parameters() if not parameter.is_meta)
        device = next(devices, torch.device("cpu"))
    found = units or find_units(model)
    timeline = _probe_opened(model, program, found, device, material)
    for mixed in (False, True) if units is None else ():
        more = find_units(model, deep=True, mixed=mixed)
        too_few = sum(call.unit in timeline.blocks for call in timeline.calls) < stages
        if too_few and len(more.blocks) > len(found.blocks):
            found, timeline = more, _probe_opened(model, program, more, device, material)
    return timeline


def _probe_opened(
    model: nn.Module,
    program: ModelCall,
    units: Units,
    device: torch.device,
    material: Material | None = None,
    drawn: float | None = None,
) -> ModelTrace:
    original = units
    while True:
        recorder, result = _run(model, program, units, device, material, drawn)
        hiding = [name for name in _hiding(recorder, units) if weighty_children(units.modules[name])]
        if not hiding:
            break
        units = open_units(units, hiding)
    problems = [*recorder.ledger.problems, *recorder.ledger.leaks.values()]
    if problems:
        raise PlanError(problems[0])
    timeline = ModelTrace(
        values=tuple(recorder.ledger.values),
        calls=tuple(_mark_starts(recorder.calls, units.blocks, original.blocks)),
        glue=tuple(recorder.glue),
        units=tuple(units.modules),
        blocks=units.blocks,
        parameter_bytes=MappingProxyType(
            {name: parameter.numel() * parameter.element_size() for name, parameter in model.named_parameters()}
        ),
        buffers=tuple(name for name, _ in model.named_buffers()),
        result=result,
        random=recorder.draws.any,
        on_zeros=recorder.on_zeros,
    )
    if drawn is None and recorder.random_read is not None:
        for extreme in _EXTREMES:
            what = trace_difference(timeline, _probe_opened(model, program, original, device, drawn=extreme))
            if what is not None:
                raise PlanError(
                    f"{recorder.random_read} chooses the path of the forward by a random number: with another one it "
                    f"{what}; a pipeline is cut for one path: switch that off (layerdrop 0), or move it into a block."
                )
    return timeline


def _run(
    model: nn.Module,
    program: ModelCall,
    units: Units,
    device: torch.device,
    material: Material | None,
    drawn: float | None,
) -> tuple[Recorder, Recipe]:
    if material is not None:
        material.clear()
    recorder = Recorder(model, units, device, material, drawn)
    with ExitStack() as stack:
        stack.enter_context(restoring_state(model, device))
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
        stack.enter_context(recorder.flops)
        stack.enter_context(recorder.draws)
        stack.enter_context(recorder)
        try:
            result = program()
        except Exception as error:
            if recorder.ledger.problems:  # what was read on the host was no real content
                raise PlanError(recorder.ledger.problems[0]) from error
            raise
    return recorder, recorder.finish(result)


def _hiding(recorder: Recorder, units: Units) -> Iterable[str]:
    """Units to open: all of a class of which one leaks, and those that are used without being called."""
    leaking = {type(units.modules[name]) for name in recorder.ledger.leaks}
    called = {call.unit for call in recorder.calls}
    for name, module in units.modules.items():
        if type(module) in leaking or (name not in called and recorder.used_by_glue(module)):
            yield name


def _mark_starts(calls: list[Call], blocks: tuple[str, ...], original: tuple[str, ...]) -> list[Call]:
    """Stages may start where a block starts; the first call inside an opened block is where that one starts."""
    of_block = set(blocks)
    marked: list[Call] = []
    last: str | None = None
    seen: set[str] = set()
    for call in calls:
        block = next((name for name in original if is_inside(call.unit, name)), None)
        block = block if call.unit in of_block else None
        starts = block is not None and (block == call.unit or block != last or call.unit in seen)
        if starts:
            seen = set()
        seen.add(call.unit)
        last = block
        marked.append(replace(call, starts_block=starts))
    return marked
