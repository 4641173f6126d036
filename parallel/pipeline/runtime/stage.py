"""Execution of the stages of a partition on one model, in the user's own forward.

A model may contain several stages (virtual stages) and get several input signatures: each forward has its own trace and
plan. This module communicates nothing: the caller passes received tensors and gets the tensors to send.

Parameters of other stages are placeholders; code outside the engine must not read them, because their NaNs would
silently enter its results, such as an average of the weights. While the engine runs the model, operations between calls
may compute on placeholders; their results are replaced by received values.

Tier 2 of a stage's forward compares every operation between calls that reads or writes a value with the trace by name:

    this stage needs it      the operation runs; values for other stages are stored
    its value was received   the received value replaces the result
    neither                  the operation is skipped; its random numbers are drawn, so that streams stay equal

Free operations are not compared: they may depend on the content of the batch (a padding mask may be full or not).
"""

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from traceback import clear_frames
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode_temporarily
from torch.utils._pytree import tree_map

from engine.errors import EngineError
from engine.parallel.activation_checkpointing.blocks import as_in_forward
from engine.parallel.activation_checkpointing.second_run import BlockState
from engine.parallel.model.blocks import compiled_around
from engine.parallel.model.forward_patch import ForwardPatches, Interception, PatchLayer
from engine.parallel.model.placeholders import PlaceholderPool, is_plain
from engine.parallel.model.torch_checkpoint import CheckpointedRegion, open_checkpoints, recomputed, spread_checkpoints
from engine.parallel.pipeline.partition.stage_plan import StagePlan
from engine.parallel.pipeline.runtime.stage_forward import StageForward, StopForward, leaves_of
from engine.parallel.tensor.deferred_linear import fused_as_first
from engine.parallel.trace.absent_parameter import conceal
from engine.parallel.trace.model_trace import FromArgument, FromValue, ModelTrace, Recipe
from engine.parallel.trace.torch_function import (
    Function,
    Operation,
    functions_shown_to,
    plain_leaves,
    user_place,
    wrapper_among,
)

_MODULE_BACKWARD_HOOK = "apply:BackwardHookFunction"


class WatchingForward(StageForward, TorchFunctionMode):
    """Base of a stage's forward that sees the torch functions between module calls."""

    def _prepare(self) -> None:
        TorchFunctionMode.__init__(self)
        self._quiet = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        with functions_shown_to(self._show), self:
            try:
                yield
            finally:
                self._quiet = True  # recomputations enter the modes of the forward again

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        wrapper = wrapper_among(args, kwargs)
        if wrapper is not None:
            with self:
                return wrapper.__torch_function__(func, types, args, kwargs)
        return self._show(func, args, kwargs or {})

    def _show(self, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._quiet or self.inside:
            return function(*args, **kwargs)
        operation = Operation(function, args, kwargs)
        with self._aside():
            return self._run(operation)

    def _run(self, operation: Operation) -> Any:
        raise NotImplementedError

    @contextmanager
    def _in_unit(self) -> Iterator[None]:
        # the mode is popped if it is the innermost: operations inside the unit are faster, and a compiler sees no mode
        on_top = _get_current_function_mode() is self  # type: ignore[no-untyped-call]
        with super()._in_unit(), _pop_mode_temporarily() if on_top else nullcontext():
            yield

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """Marks the operations inside the context as the engine's own, not as events of the program."""
        before, self._quiet = self._quiet, True
        try:
            yield
        finally:
            self._quiet = before


class PathForward(WatchingForward):
    """Forward of one stage for code that chooses its path by content of the batch: it refuses a path on which this
    stage needs a tensor that the recorded path does not bring here.
    """

    def _prepare(self) -> None:
        super()._prepare()
        self._absent: dict[int, weakref.ref[Tensor]] = {}
        present = self.plan.parameters
        for name, parameter in self._parameters.items():
            self._note(parameter, name not in present)

    def call(self, unit: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.skips_next():
            self._need((args, kwargs), f"unit {unit!r}")
        return super().call(unit, forward, args, kwargs)

    def skip(self, output: Recipe, writes: tuple[tuple[int, int], ...], arguments: list[Any]) -> Any:
        with self._aside():
            out = super().skip(output, writes, arguments)
        for leaf, tensor in zip(output.leaves, leaves_of(out), strict=True):
            if isinstance(leaf, FromValue):
                self._note(tensor, leaf.value not in self._received)
        for position, number in writes:
            self._note(arguments[position], number not in self._received)
        return out

    def give(self, result: Any) -> Any:
        if self.plan.last:
            self._need(result, "its result")
        return result

    def _run(self, operation: Operation) -> Any:
        absent = operation.reads_values and not operation.is_blank and any(map(self._is_absent, operation.tensors))
        out = operation.run()
        if absent:
            for leaf in (*plain_leaves(out), *operation.written):
                self._note(leaf, True)
        return out

    def _need(self, tree: Any, reader: str) -> None:
        if any(isinstance(leaf, Tensor) and self._is_absent(leaf) for leaf in plain_leaves(tree)):
            raise EngineError(
                f"the forward gives {reader} a tensor of another pipeline stage, which the recorded forward does not "
                "use there; let the code between module calls read the same tensors for all contents of the batch, or "
                "move the choice into a block."
            )

    def _is_absent(self, tensor: Tensor) -> bool:
        noted = self._absent.get(id(tensor))
        return noted is not None and noted() is tensor

    def _note(self, leaf: Any, absent: bool) -> None:
        if isinstance(leaf, Tensor):
            self._absent.pop(id(leaf), None)
            if absent:
                self._absent[id(leaf)] = weakref.ref(leaf)


class GlueForward(WatchingForward):
    """Forward of one stage: it runs the stage's module calls and operations between calls.

    Calls and operations of other stages return received tensors, and NaN for tensors not received. A difference from
    the recorded forward raises EngineError.
    """

    def _prepare(self) -> None:
        super()._prepare()
        self._operations = 0
        self._here: dict[int, tuple[weakref.ref[Tensor], bool]] = {}
        """(tensor of a value, True if it has content here) by the tensor's id."""
        self._written: dict[int, tuple[torch.UntypedStorage, bool]] = {}
        """(storage that values were written to, True if its content is here) by storage id; stored, so that ids stay
        unique."""
        present = self.plan.parameters
        self._of_model = {id(parameter): name in present for name, parameter in self._parameters.items()}

    def skip(self, output: Recipe, writes: tuple[tuple[int, int], ...], arguments: list[Any]) -> Any:
        with self._aside():
            out = super().skip(output, writes, arguments)
        for leaf, tensor in zip(output.leaves, leaves_of(out), strict=True):
            if isinstance(leaf, FromValue):
                self._note(tensor, leaf.value in self._received)
        for position, number in writes:
            self._note(arguments[position], number in self._received)
        return out

    def keep(self, output: Recipe, writes: tuple[tuple[int, int], ...], arguments: list[Any], out: Any) -> Any:
        with self._aside():
            out = super().keep(output, writes, arguments, out)
        for leaf, tensor in zip(output.leaves, leaves_of(out), strict=True):
            if not isinstance(leaf, FromArgument) or tensor is not arguments[leaf.argument]:
                self._note(tensor, True)
        for position, _ in writes:
            self._note(arguments[position], True)
        return out

    def _check_event(self, event: int, what: str) -> None:
        if event != self._calls + self._operations:
            expected = self._expected()
            raise EngineError(
                f"the forward reaches {what}, but the recorded forward has {expected} there; let the code between "
                "module calls run the same operations for all inputs of the same shapes."
            )

    def _expected(self) -> str:
        if self._operations == len(self.trace.glue):
            return "no more operations"
        glue = self.trace.glue[self._operations]
        return f"{glue.name} at {glue.place}" if glue.calls_before == self._calls else "a call"

    def _run(self, operation: Operation) -> Any:
        free = operation.is_metadata or operation.is_blank or not any(map(self._knows, operation.tensors))
        return operation.run() if free else self._decide(operation)

    def _decide(self, operation: Operation) -> Any:
        index = self._operations
        glue = self.trace.glue[index] if index < len(self.trace.glue) else None
        self.stop_after(glue.event if glue else None)
        if glue is None or glue.name != operation.name or glue.calls_before != self._calls:
            self._check_event(-1, f"{operation.name} at {user_place()}")
            raise AssertionError("no event has a negative number")
        self._operations += 1
        if index in self.plan.glue or (not glue.makes and all(map(self._has_content, operation.tensors))):
            out = operation.run()
            kept = self.keep(glue.output, glue.writes, operation.leaves, out)
            self._note_written(operation, True)
            return kept
        if glue.random:
            self._draw(operation)
        out = self.skip(glue.output, glue.writes, operation.leaves)
        if operation.name == _MODULE_BACKWARD_HOOK:  # torch looks for this function in the graph of the output
            out = operation.function(*out) if isinstance(out, tuple) else operation.function(out)
            for tensor in leaves_of(out):
                self._note(tensor, True)
        self._note_written(operation, all(number in self._received for _, number in glue.writes))
        return out

    def _draw(self, operation: Operation) -> None:
        def ones(leaf: Any) -> Any:
            known = isinstance(leaf, Tensor) and self._knows(leaf)
            return torch.ones(leaf.shape, dtype=leaf.dtype, device=leaf.device) if known else leaf

        args, kwargs = tree_map(ones, (operation.args, dict(operation.kwargs)))
        with torch.no_grad():
            operation.function(*args, **kwargs)

    # ---- which tensors are values

    def _knows(self, tensor: Tensor) -> bool:
        return self._find(tensor) is not None

    def _has_content(self, tensor: Tensor) -> bool:
        return self._find(tensor) is not False

    def _find(self, tensor: Tensor) -> bool | None:
        """Returns True if a value or parameter has content here, False for a placeholder; None for a free tensor."""
        noted = self._here.get(id(tensor))
        if noted is not None and noted[0]() is tensor:
            return noted[1]
        if id(tensor) in self._of_model:
            return self._of_model[id(tensor)]
        if (
            self._written
            and is_plain(tensor)
            and not isinstance(tensor, nn.Parameter)
            and tensor.layout == torch.strided
            and tensor.untyped_storage()._cdata in self._written
        ):
            return self._written[tensor.untyped_storage()._cdata][1]
        return None

    def _note(self, leaf: Any, has_content: bool) -> None:
        if isinstance(leaf, Tensor) and id(leaf) not in self._of_model:
            self._here[id(leaf)] = weakref.ref(leaf), has_content

    def _note_written(self, operation: Operation, has_content: bool) -> None:
        for tensor in (*operation.written, *operation.statistics):
            storage = tensor.untyped_storage()
            self._written[storage._cdata] = storage, has_content


@dataclass(frozen=True)
class StageResult:
    """Result of the forward of one stage for one microbatch: return value, and tensors to send."""

    result: Any
    """Return value of the user's forward; None if this stage does not run to its end."""
    sent: dict[int, Tensor]
    """Tensor of each value in the plan's ``sends``, attached to autograd.

    The tensor of a unit is the output of forward before forward hooks, which run on the receiving stage.
    """


class Stage:
    """Model with a forward that runs only one pipeline stage.

    Module calls of other stages return received tensors, and NaN for tensors not received.
    """

    def __init__(self, model: nn.Module, device: torch.device, patches: ForwardPatches) -> None:
        self._model, self._placeholders, self._patches = model, PlaceholderPool(device), patches
        self._parameters = dict(model.named_parameters())
        self._states: dict[str, BlockState] = {}
        """State of each intercepted unit, for recomputations."""
        self._interception = Interception(
            handler=self._call, layer=PatchLayer.STAGE, patches=patches, skips=self._skips
        )
        self._run: StageForward | None = None
        self._seen: ModelTrace | None = None

    def forward(
        self, trace: ModelTrace, plan: StagePlan, program: Callable[[], Any], received: Mapping[int, Tensor]
    ) -> StageResult:
        """Runs ``program``, the user's forward recorded in ``trace``, as far as ``plan`` needs it.

        Args:
            trace: recorded forward, with numbered values (tensors).
            received: leaf tensor for each value of ``plan.receives``.

        Returns the program's result (on the last stage) and ``sent``, the tensors to send. After backward from the
        result and ``sent``, ``.grad`` of ``received`` contains the gradients for earlier stages.

        Raises:
            EngineError: the program takes another path than in the trace, or a value has another shape.
        """
        if received.keys() != plan.receives.keys():
            raise EngineError(
                f"Stage.forward got tensors for the values {sorted(received)} in argument received, but stage "
                f"{plan.stage} receives the values {sorted(plan.receives)}; pass one tensor for each, and no other."
            )
        self._intercept(trace)
        kind = GlueForward if plan.tier == 2 else PathForward if trace.reads_batch else StageForward
        run = kind(trace, plan, received, self._parameters, self._placeholders)
        result = None
        before, self._run = self._run, run
        try:
            with open_checkpoints(recompute=True), spread_checkpoints(run), run.watching():
                result = run.give(program())
        except StopForward as stop:
            if stop.run is not run:
                raise
            # context managers of the left frames (autocast, no_grad) must exit now, not at garbage collection
            clear_frames(stop.__traceback__)
        finally:
            self._run = before
        run.finish()
        sent = {number: run.sent[number] for number in plan.sends}
        return StageResult(result if plan.last else None, sent)

    def _intercept(self, trace: ModelTrace) -> None:
        if trace is self._seen:
            return
        self._seen = trace
        for unit in trace.units:
            if unit not in self._states:
                module = self._model.get_submodule(unit)
                self._states[unit] = BlockState(module)
                note = "runs on its pipeline stage; on other stages the call returns received values"
                self._interception.install(unit, module, note)
        for module in compiled_around(self._model, trace.unit_names).values():
            self._run_eagerly(module)

    def _run_eagerly(self, module: nn.Module) -> None:
        """Runs a compiled module without its compiled code, which would hide the values between the units inside it."""
        with self._patches.changing(module, PatchLayer.STAGE, "runs uncompiled, because stages are cut inside it"):
            object.__setattr__(module, "_compiled_call_impl", None)
            if isinstance(inner := getattr(module, "_orig_mod", None), nn.Module):
                object.__setattr__(module, "forward", inner)

    def _skips(self, unit: str) -> bool:
        return self._run is not None and self._run.takes(unit) and self._run.skips_next()

    def _call(self, unit: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        run = self._run
        if run is None or not run.takes(unit):  # recomputed in backward, or inside another unit
            return forward(*args, **kwargs)
        if run.regions and torch.is_grad_enabled() and not run.skips_next() and run.repeats_next():
            forward = partial(self._recompute, run.regions[-1], unit, forward)
        return run.call(unit, forward, args, kwargs)

    def _recompute(
        self, region: CheckpointedRegion, unit: str, forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Runs a unit of ``region``, which backward recomputes."""
        forward = as_in_forward(forward, region.again)
        restores, module = region.restores, self._model.get_submodule(unit)
        again = self._states[unit].keeping(forward) if restores else fused_as_first(module, forward)
        return recomputed(again, region)(*args, **kwargs)


class AbsentParameters:
    """Guard that raises EngineError if the user's code reads a parameter that this rank does not store.

    Args:
        present: names of the stored parameters.
        stages: pipeline ranks that store each parameter, by name.
        rank: this pipeline rank.
    """

    def __init__(
        self, model: nn.Module, present: Collection[str], stages: Mapping[str, Collection[int]], rank: int
    ) -> None:
        self._rank = rank
        self._running = self._closed = False
        kept = {id(parameter) for name, parameter in model.named_parameters() if name in present}
        for name, parameter in model.named_parameters():
            if id(parameter) not in kept:
                where = f"on pipeline rank {' and '.join(map(str, sorted(stages[name])))}"
                conceal(parameter, partial(self._read, name, where), where)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Allows reads of absent parameters inside the context, in which the engine runs the model."""
        before, self._running = self._running, True
        try:
            yield
        finally:
            self._running = before

    def retire(self) -> None:
        """Marks the engine as closed, which changes the error text of later reads."""
        self._closed = True

    def _read(self, name: str, where: str) -> None:
        if self._running:
            return
        absent = f"parameter {name!r} is {where} and has no values on this rank, which is pipeline rank {self._rank}"
        if self._closed:
            raise EngineError(f"{absent}, and the engine is closed; call eng.full_state_dict() before eng.close().")
        raise EngineError(
            f"{absent}; run the model by eng.train_batch(batch) or eng.eval_batch(batch, return_output=True), and read "
            "weights by eng.full_state_dict(), eng.save_pretrained(folder) or, for this rank's alone, by "
            "`with eng.full_parameters() as parameters:`."
        )
