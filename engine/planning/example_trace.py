"""Trace of an example microbatch before the run: one forward on shapes, without memory or processes.

It records the tensors that cross stages and the bytes that sharded layers send. The model runs in its compute dtypes
with autograd, before its parameters are sharded.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from engine.config import Config
from engine.errors import PlanError
from engine.parallel.context.recurrence.followed import ContextPlan, follow_sequences, with_refusal
from engine.parallel.context.recurrence.moved_rows import HALO
from engine.parallel.context.recurrence.relay import RECURRENT_STATE
from engine.parallel.context.rows.call_forms import CallRecorder
from engine.parallel.context.rows.rowwise import RowwiseModule, find_rowwise
from engine.parallel.model.forward_patch import ForwardPatches
from engine.parallel.model.placeholders import placeholder
from engine.parallel.pipeline.partition.partition import Split, units_for_split
from engine.parallel.tensor.global_tensor.global_tensor import LocalOnlyError
from engine.parallel.tensor.layers.planned_traffic import CollectiveRecorder
from engine.parallel.tensor.tp_axis import DryAxis
from engine.parallel.trace.model_trace import Material, ModelTrace
from engine.parallel.trace.tracer import trace_model
from engine.planning.budgets import sequence_unit
from engine.planning.cost_model.attention_rates import asked_method
from engine.precision.dtypes import Precision
from engine.precision.fp32_modules import put_casts
from engine.program.batch import Batch, map_tensors, named_tensors
from engine.program.context_program import ContextProgram, with_context
from engine.program.program import Program


class SharedSequences:
    """Tracer of an example batch that is divided along sequences: each context rank has a part of every sequence.

    If a module raises an error on a part, the batch is traced again, and this module gets full sequences.
    """

    def __init__(
        self, config: Config, program: Program, example: Batch, card: str = "", local: Sequence[RowwiseModule] = ()
    ) -> None:
        """``local``: modules that run on this rank's positions as plain tensors."""
        self.plan = ContextPlan()
        self.axes = (DryAxis(config.cp, name="cp"),) if config.cp > 1 else ()
        self._config, self._own, self._example = config, program, example
        self._ran, self._local = program, tuple(local)
        self._asked = asked_method(config, card)

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences about the last trace for the startup banner; () with one context rank."""
        return self._ran.notes if isinstance(self._ran, ContextProgram) else ()

    def trace(self, stages: int, watch: CollectiveRecorder | None) -> ModelTrace:
        """Returns the trace of one training microbatch (forward and loss) for ``stages`` pipeline stages.

        Traces again, with a changed plan of the sequences, until a trace needs no further change; for example, a module
        may need full sequences. ``watch``: recorder of tensor- and context-parallel traffic, or None.
        """
        while True:
            patches, needs = ForwardPatches(), None
            try:
                trace = self._trace(stages, watch, patches)
                needs = self._needs(trace, watch)
                if needs is None:
                    return trace
            except (PlanError, LocalOnlyError) as problem:
                needs = with_refusal(self._own.model, self.plan, problem) if self.axes else None
                if needs is None:
                    self.plan = replace(self.plan, by_work=False)  # what the model sends is unknown
                    raise
            finally:
                patches.remove()
            self.plan = needs

    def _needs(self, trace: ModelTrace, watch: CollectiveRecorder | None) -> ContextPlan | None:
        """Returns the plan of the next trace; None if this one is the last, whose figures the plan then has."""
        ran, plan = self._ran, self.plan
        if watch is None or not isinstance(ran, ContextProgram):
            return None
        if not plan.in_blocks and sends(watch, RECURRENT_STATE):
            return replace(plan, in_blocks=True, by_work=False)  # a state then passes each border once
        halo = sends(watch, HALO)
        if plan.by_work and self._config.pp > 1 and (halo or not ran.keeps_positions(trace)):
            return replace(plan, by_work=False)
        self.plan = replace(plan, halo=halo, pairs=ran.balance.pairs)
        return None

    def _trace(self, stages: int, watch: CollectiveRecorder | None, patches: ForwardPatches) -> ModelTrace:
        parallel, plan = self._config.parallel, self.plan
        for axis in self.axes:
            follow_sequences(self._own.model, plan, patches)
            unit = sequence_unit(self._config)
            ran = with_context(self._own, axis, self._asked, plan, unit=unit)
            self._ran = replace(ran, local=self._local) if isinstance(ran, ContextProgram) else ran
        return trace_example(self._ran, self._example, stages, watch, split=parallel.split)


def sends(watch: CollectiveRecorder, label: str) -> bool:
    """Returns True if ``watch`` has recorded a collective with this ``label``."""
    return any(one.what.label == label for one in watch.sent)


def trace_example(
    program: Program,
    example: Batch,
    stages: int,
    watch: CollectiveRecorder | None = None,
    material: Material | None = None,
    split: Split = "auto",
) -> ModelTrace:
    """Traces forward and loss of one training microbatch on shapes without values, and returns the trace.

    Args:
        example: batch with the shapes of the microbatch.
        stages: number of pipeline stages.
        watch: recorder of tensor- and context-parallel traffic, or None.
        material: record that is filled with the arguments of every module call, or None.
        split: ``parallel.split`` of the configuration; the trace records each module named there as a call of its own.

    Raises:
        PlanError: the model cannot be traced; names the operation and its line.
    """
    microbatch = map_tensors(example, _real)
    there = program.on(torch.device("cpu"))

    def run() -> tuple[Any, ...]:
        with watch.run() if watch else nullcontext():
            loss = there.planned_loss(microbatch)
            if watch is not None:
                watch.keep_reached(loss.sum)
            return tuple(loss)

    # shard first: keep_fp32 wraps the forwards of the layers that the run has
    cut, dtypes = watch.cut() if watch else nullcontext(), run_dtypes(program.model, program.precision)
    with torch.enable_grad(), cut, dtypes, program.local_modules():
        units = units_for_split(program.model, split, stages)
        return trace_model(program.model, run, units, stages=stages, material=material)


def trace_rowwise(program: Program, example: Batch, units: Sequence[str] = ()) -> tuple[RowwiseModule, ...]:
    """Returns the modules of ``program`` that compute each position independently, found by a forward on shapes.

    Returns () if the forward cannot be traced. ``units``: names of modules around which no module is taken.
    """
    recorder = CallRecorder(program.model)
    try:
        with recorder.watching():
            trace_example(program, example, 1)
    except PlanError:
        return ()
    return find_rowwise(program.model, (tensor for _, tensor in named_tensors(example)), recorder.calls, units)


def _real(tensor: Tensor) -> Tensor:
    """Returns the tensor on the CPU; zeros for a meta tensor, which has only a shape."""
    return torch.zeros(tensor.shape, dtype=tensor.dtype) if tensor.is_meta else tensor.cpu()


@contextmanager
def run_dtypes(model: nn.Module, precision: Precision) -> Iterator[None]:
    """Opens a context in which parameters and buffers of ``model`` have the dtypes of ``precision``; the end of the
    context restores dtypes and values.

    In the context, parameters with a changed dtype have no values.
    """
    patches = ForwardPatches()
    put_casts(model, precision.kept, precision.compute, patches)
    data: list[tuple[Any, Tensor]] = []
    buffers: list[tuple[nn.Module, str, Tensor]] = []
    try:
        for name, parameter in model.named_parameters():
            narrow = precision.frozen(name, parameter.dtype)
            if narrow != parameter.dtype:
                data.append((parameter, parameter.data))
                parameter.data = placeholder(parameter.shape, narrow, parameter.device)
        for path, module in model.named_modules():
            for name, buffer in module._buffers.items():
                if buffer is None:
                    continue
                dtype = precision.buffer(f"{path}.{name}" if path else name, buffer.dtype)
                if dtype != buffer.dtype:
                    buffers.append((module, name, buffer))
                    setattr(module, name, buffer.to(dtype))
        yield
    finally:
        patches.remove()
        for parameter, before in data:
            parameter.data = before
        for module, name, buffer in buffers:
            setattr(module, name, buffer)
