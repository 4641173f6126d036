"""Traces of the model's forward and their partitions, by input signature; a new signature is traced on arrival.

The user's module hooks are part of the signature. A full backward hook needs the gradients of a module's output and
inputs; it is refused if the output is sent to another stage, where no rank has both.
"""

import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from engine.errors import EngineError
from engine.parallel.model.side_effects import AttributeState, State
from engine.parallel.model.user_code import is_engine_hook
from engine.parallel.pipeline.partition.partition import Partition, repartition, units_for_split
from engine.parallel.tensor.tp_axis import TensorAxis
from engine.parallel.trace.model_trace import ModelTrace, trace_difference
from engine.parallel.trace.tracer import trace_model
from engine.planning.plan import Plan
from engine.program.batch import Batch
from engine.program.program import Program

ForwardCall = Callable[[], Any]

_SIGNATURES = 64
"""Number of cached input signatures; beyond it, the oldest is dropped and traced again when it returns."""
_STATES = 8
"""Number of cached states of the model's attributes per signature."""


class TracedForward(NamedTuple):
    """Trace of the model's forward for inputs of equal shapes and purpose, and its partition into pipeline stages."""

    trace: ModelTrace
    partition: Partition

    @property
    def digest(self) -> int:
        """31-bit hash of the order of module calls and of the tensors that stages send, for comparison between
        ranks.
        """
        sent = [tuple(plan.sends.items()) for plan in self.partition.stages]
        return zlib.crc32(repr(([call.unit for call in self.trace.calls], sent)).encode()) >> 1


class UserHooks(NamedTuple):
    """Hooks that the user has registered on modules of the model."""

    forward: tuple[tuple[str, int], ...] = ()
    """Module name and hook id of each forward hook; forward hooks are traced with the model."""
    backward: tuple[str, ...] = ()
    """Names of modules with backward hooks, except the model itself, because its inputs have no gradient."""

    @classmethod
    def of(cls, model: nn.Module) -> "UserHooks":
        """Returns the hooks on modules of ``model`` that the user has registered, without the engine's hooks."""
        everywhere = nn.modules.module._global_backward_hooks or nn.modules.module._global_backward_pre_hooks
        forward, backward = list[tuple[str, int]](), list[str]()
        for name, module in model.named_modules():
            for hooks in (module._forward_hooks, module._forward_pre_hooks):
                forward += [(name, number) for number, hook in hooks.items() if not is_engine_hook(hook)]
            if name and (module._backward_hooks or module._backward_pre_hooks or everywhere):
                backward.append(name)
        return cls(tuple(forward), tuple(backward))


class TraceCache:
    """Cache of traced forwards, by input shapes, non-tensor inputs, purpose of forward and model attributes."""

    def __init__(self, plan: Plan, program: Program, axis: TensorAxis, example: Batch) -> None:
        self._plan, self._program, self._axis = plan, program, axis
        ranks = plan.schedule.rank_of_stage
        held = [[row for row in plan.table if rank in row.owners] for rank in ranks]
        self._held = [{row.name for row in rows} for rows in held]
        """Names of the parameters of each stage, by stage; other expert ranks may hold them, but a trace reads them."""
        self._learnt = [
            {row.name for row in rows if not row.trainable or row.name in stage.parameters}
            for rows, stage in zip(held, plan.partition.stages if plan.partition else (), strict=False)
        ]
        """``_held`` without parameters that only other stages of the rank train: their bucket is reduced before."""
        self._seen: dict[object, list[tuple[State, TracedForward]]] = {}
        self._switches = AttributeState(program.model)
        self._state: State = {}
        self._agreed: State | None = None
        """The state in which all ranks of the replica have last taken one path."""
        self._hooks = UserHooks()
        # global tensors in the trace of the plan are those of rank 0
        views = plan.config.cp > 1 or (plan.tensor is not None and plan.tensor.follows_activations)
        if plan.trace is not None and plan.partition is not None and not views:
            self.refresh()
            with torch.enable_grad():
                self._seen[self._key(example, "train")] = [(self._state, TracedForward(plan.trace, plan.partition))]
        self._agreed = None  # placement has yet to write attributes

    def refresh(self) -> bool:
        """Reads the model attributes that may change the forward's path; called before each step.

        Returns True if an attribute other than ``training`` has changed since the last :meth:`agree`.
        """
        self._state = self._switches.read()
        self._hooks = UserHooks.of(self._program.model)
        if self._agreed is None:
            self._agreed = self._state
        return self._state is not self._agreed and _without_modes(self._state) != _without_modes(self._agreed)

    def agree(self) -> None:
        """Records that all ranks of the replica (one full copy of the model) trace the same path with the present
        attributes.
        """
        self._agreed = self._state

    def take(self, other: "TraceCache") -> None:
        """Replaces this cache's traces by the traces of ``other``, for a model with the same structure and plan."""
        self.refresh()
        self._seen = {key: [(self._state, found[-1][1])] for key, found in other._seen.items()}

    def of(self, microbatch: Batch, kind: str, run: ForwardCall) -> TracedForward:
        """Returns the traced forward of ``microbatch`` from the cache, or traces ``run()``. No communication.

        ``kind``: purpose of the forward, such as "train".

        Raises:
            PlanError: the forward of this input does not fit the planned pipeline stages.
            EngineError: a module with the user's backward hook runs on several stages, or sends to another stage.
        """
        traced = self._of(microbatch, kind, run)
        if self._hooks.backward and torch.is_grad_enabled():
            check_boundary_hooks(self._hooks.backward, *traced)
        return traced

    def _of(self, microbatch: Batch, kind: str, run: ForwardCall) -> TracedForward:
        key = self._key(microbatch, kind)
        known = self._seen.get(key, [])
        for state, traced in known:
            if self._switches.same(state, self._state):
                return traced
        found = self._partition(run)
        for state, traced in known:
            if trace_difference(traced.trace, found.trace) is None:
                self._switches.settle(state, self._state)
                found = traced
        if len(self._seen) >= _SIGNATURES and key not in self._seen:
            del self._seen[next(iter(self._seen))]
        self._seen[key] = [*known[1 - _STATES :], (self._state, found)]
        return found

    def check_trace(self, microbatch: Batch, kind: str, run: ForwardCall) -> None:
        """Traces ``run()``, the forward of ``microbatch``, again after a NaN loss; compares with the cached trace.

        No communication. ``kind``: purpose of the forward, such as "train".

        Raises:
            EngineError: the traces differ; names the first difference, and drops the cached trace.
        """
        found = self.of(microbatch, kind, run)
        what = trace_difference(found.trace, self._trace(run))
        if what is not None:
            del self._seen[self._key(microbatch, kind)]
            raise EngineError(
                f"the loss is NaN, because the forward has changed since it was traced: it {what}; choose its path "
                "only by shapes of the input and by attributes of modules that are set between steps."
            )

    def _partition(self, run: ForwardCall) -> TracedForward:
        assert self._plan.partition is not None
        trace = self._trace(run)
        self._program.check_trace(trace)
        held = self._learnt if torch.is_grad_enabled() else self._held
        return TracedForward(trace, repartition(trace, self._plan.partition.boundaries, held))

    def _trace(self, run: ForwardCall) -> ModelTrace:
        """Traces a forward, with the dtypes that it has when it runs."""
        program = self._program
        with self._axis.dry_run(), program.on_shapes(), program.precision.forward(program.device):
            stages = self._plan.schedule.stages
            units = units_for_split(self._program.model, self._plan.config.parallel.split, stages)
            return trace_model(self._program.model, run, units, stages)

    def _key(self, microbatch: Batch, kind: str) -> object:
        leaves, spec = pytree.tree_flatten(microbatch)
        shapes = tuple(
            (tuple(leaf.shape), leaf.dtype, leaf.requires_grad) if isinstance(leaf, Tensor) else repr(leaf)
            for leaf in leaves
        )
        return kind, torch.is_grad_enabled(), str(spec), shapes, self._hooks.forward


def _without_modes(state: State) -> State:
    return {place: value for place, value in state.items() if place[1] != "training"}


def check_boundary_hooks(hooked: Sequence[str], trace: ModelTrace, partition: Partition) -> None:
    """Checks that no module in ``hooked`` (modules with backward hooks) is on several stages or sends to another.

    Raises:
        EngineError: a module does; the message names the first one.
    """
    sent = set(_sending_units(trace, partition))
    stages: dict[str, set[int]] = {}
    for plan in partition.stages:
        for index in plan.calls:
            stages.setdefault(trace.calls[index].unit, set()).add(plan.stage)
    for name in hooked:
        within: set[int] = set().union(*(found for unit, found in stages.items() if unit.startswith(f"{name}.")))
        if name in sent or len(within) > 1:
            why = "is on several pipeline stages" if len(within) > 1 else "sends its output to another pipeline stage"
            raise EngineError(
                f"module {name!r} has a backward hook (register_full_backward_hook, register_full_backward_pre_hook) "
                f"and {why}, where it would not be called; hook a module inside of a stage, or the output itself "
                "(output.register_hook), or set parallel.pipeline to 1."
            )


def _sending_units(trace: ModelTrace, partition: Partition) -> Iterator[str]:
    for plan in partition.stages:
        for number in plan.sends:
            value = trace.values[number]
            if value.maker == "call":
                yield trace.calls[value.index].unit
