"""Forward of one stage: the user's program, with received values or NaN as results of absent calls.

    call of this stage         runs; values for other stages are stored
    call of another stage      does not run; returns received values, else NaN; hooks of the unit run
    glue                       runs on any content (tier 1); :class:`GlueForward` decides on each operation (tier 2)

The program ends early, at the first event after the last needed one, so that all hooks of the last unit have run.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_unflatten

from engine.errors import EngineError
from engine.parallel.model.placeholders import PlaceholderPool, is_expanded
from engine.parallel.model.torch_checkpoint import CheckpointedRegion
from engine.parallel.model.user_code import is_engine_hook
from engine.parallel.pipeline.partition.stage_plan import StagePlan
from engine.parallel.trace.model_trace import (
    Constant,
    FreeTensor,
    FromArgument,
    FromParameter,
    FromValue,
    Leaf,
    ModelTrace,
    Recipe,
)

_REMEDY = "let the forward of the model make the same calls for all inputs of the same shapes."


def leaves_of(out: Any) -> list[Any]:
    """Returns the pytree leaves of ``out``, a module's output; a single tensor is its own leaf."""
    return [out] if type(out) is Tensor else tree_leaves(out)


def _has_hook(tensor: Tensor) -> bool:
    """Returns True if the user's code has registered a hook on the tensor."""
    hooks = tensor._backward_hooks
    return hooks is not None and not all(map(is_engine_hook, hooks.values()))


class StopForward(BaseException):
    """Exception that ends the user's forward after the last computation of this stage.

    A BaseException, so that ``except Exception`` in user code does not catch it.
    """

    def __init__(self, run: "StageForward") -> None:
        super().__init__()
        self.run = run


class StageForward:
    """Forward of one stage for one microbatch: runs module calls of this stage only.

    Operations between module calls run on every stage.
    """

    def __init__(
        self,
        trace: ModelTrace,
        plan: StagePlan,
        received: Mapping[int, Tensor],
        parameters: Mapping[str, nn.Parameter],
        placeholders: PlaceholderPool,
    ) -> None:
        self.trace, self.plan = trace, plan
        self.inside = False
        """True while a unit runs: inner calls are not events."""
        self.regions: list[CheckpointedRegion] = []
        """Checkpointed regions around the current code; see ``torch_checkpoint``."""
        self.sent: dict[int, Tensor] = {}
        self._apart: set[int] = set()
        """Sent values that share memory with another tensor of the program."""
        self._received, self._parameters, self._placeholders = received, parameters, placeholders
        self._calls = 0
        for number, tensor in received.items():
            self._check(number, tensor, "received")
        self._prepare()

    def _prepare(self) -> None:
        """Initialises the additional state of a tier."""

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Returns an empty context; a subclass may observe torch functions in it."""
        yield

    def give(self, result: Any) -> Any:
        """Returns ``result``, what the program returned; a subclass may refuse it."""
        return result

    def takes(self, unit: str) -> bool:
        """Returns True if the recorded forward has calls of the module ``unit``, and no other recorded module is
        running.
        """
        return not self.inside and unit in self.trace.unit_names

    def skips_next(self) -> bool:
        """Returns True if the next module call of the trace belongs to another stage."""
        return self._calls not in self.plan.calls

    def repeats_next(self) -> bool:
        """Returns True if the next module call of the trace can run again in backward: no operation writes to the
        memory of the values that it reads.
        """
        read = self.trace.calls[self._calls].inputs if self._calls < len(self.trace.calls) else ()
        return not any(self.trace.values[number].rewritten for number in read)

    def call(self, unit: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a module call of this stage; for other stages returns received tensors, and NaN for tensors not
        received.

        ``forward``: the unpatched forward of the module ``unit``.
        """
        index = self._calls
        call = self.trace.calls[index] if index < len(self.trace.calls) else None
        self.stop_after(call.event if call else None)
        if call is None or call.unit != unit:
            expected = f"unit {call.unit!r}" if call else "the end"
            raise EngineError(
                f"the forward calls unit {unit!r}, but the recorded forward has {expected} there; {_REMEDY}"
            )
        self._check_event(call.event, f"unit {unit!r}")
        self._calls += 1
        # only some calls refer to arguments, and flattening them costs host time
        leaves = tree_leaves((args, kwargs)) if self.trace.asks_arguments[index] else []
        if index not in self.plan.calls:
            return self.skip(call.output, call.writes, leaves)
        with self._in_unit():
            out = forward(*args, **kwargs)
        return self.keep(call.output, call.writes, leaves, out)

    def finish(self) -> None:
        """Checks, after the forward, that every tensor to send exists.

        Raises:
            EngineError: the forward ended early, or a sent tensor has a hook that the recorded forward lacks.
        """
        for number, tensor in self.sent.items():
            if number not in self._apart and _has_hook(tensor):
                raise EngineError(
                    f"{self.trace.describe(number)} goes to another stage and has a hook (register_hook), but had none "
                    "when the engine recorded the forward; register the hook in every forward or in none."
                )
        missing = [number for number in self.plan.sends if number not in self.sent]
        if missing:
            what = self.trace.describe(missing[0])
        elif self.plan.last and self._calls < len(self.trace.calls):
            what = f"a call of unit {self.trace.calls[self._calls].unit!r}"
        else:
            return
        raise EngineError(f"the forward ended before {what}, but the recorded forward reaches it; {_REMEDY}")

    def stop_after(self, event: int | None) -> None:
        """Raises StopForward if this stage needs neither ``event`` nor a later event of the recorded forward.

        ``event``: number of the next call or operation; None at the end.
        """
        if not self.plan.last and (event is None or event > self.plan.last_event):
            raise StopForward(self)

    def skip(self, output: Recipe, writes: tuple[tuple[int, int], ...], arguments: list[Any]) -> Any:
        """Returns the result of a call or operation of another stage: received tensors, and NaN for tensors not
        received.

        ``output``: structure of the result. ``writes``: (position in ``arguments``, value number) of tensors written in
        place; the method copies received values into them.
        """
        for position, number in writes:
            if number in self._received:
                self._put(arguments[position], number)
        leaves = [self._rebuild(leaf, arguments) for leaf in output.leaves]
        return leaves[0] if output.spec.is_leaf() else tree_unflatten(leaves, output.spec)

    def keep(self, output: Recipe, writes: tuple[tuple[int, int], ...], arguments: list[Any], out: Any) -> Any:
        """Stores those results of a call that another stage needs, until they are sent. Returns ``out``, with a view in
        place of each sent tensor that has a hook.

        ``output``: structure of the result ``out``. ``writes``: (index in ``arguments``, index in the trace's values)
        of tensors written in place.
        """
        leaves = leaves_of(out)
        if len(leaves) != len(output.leaves):
            numbers = [leaf.value for leaf in output.leaves if isinstance(leaf, FromValue)]
            what = self.trace.describe(numbers[0]) if numbers else "the output of a unit"
            raise EngineError(
                f"{what} consists of {len(leaves)} values, but of {len(output.leaves)} in the recorded forward; "
                "return the same number of values for all inputs of the same shapes."
            )
        for position, number in writes:
            self._keep(number, arguments[position])
        apart = False
        for place, leaf in enumerate(output.leaves):
            if isinstance(leaf, FromValue):
                tensor = leaves[place]
                self._keep(leaf.value, tensor)
                if self._is_hooked(leaf.value, tensor):
                    self._apart.add(leaf.value)
                    leaves[place], apart = tensor.view_as(tensor), True
        if not apart:
            return out
        return leaves[0] if output.spec.is_leaf() else tree_unflatten(leaves, output.spec)

    def _is_hooked(self, number: int, tensor: Any) -> bool:
        """Returns True if the unit, or code after the unit, hooks a tensor that this stage sends uncopied."""
        if self.sent.get(number) is not tensor or type(tensor) is not Tensor or not tensor.requires_grad:
            return False
        return self.trace.values[number].hooked or _has_hook(tensor)

    @contextmanager
    def _in_unit(self) -> Iterator[None]:
        self.inside = True
        try:
            yield
        finally:
            self.inside = False

    def _check_event(self, event: int, what: str) -> None:
        """Compares the position of an event with the trace; tier 1 cannot compare, because it does not watch glue."""

    def _keep(self, number: int, tensor: Tensor) -> None:
        if number in self.plan.sends:
            self._check(number, tensor, "sent")
            # a copy: the receiver gets the current content, not the result of a later in-place operation
            self.sent[number] = tensor.clone() if self.trace.values[number].rewritten else tensor

    def _check(self, number: int, tensor: Tensor, verb: str) -> None:
        value = self.trace.values[number]
        if tuple(tensor.shape) != value.shape or tensor.dtype != value.dtype:
            what = self.trace.describe(number)
            raise EngineError(
                f"{what} is {verb} as {tensor.dtype} {tuple(tensor.shape)}, but is {value.dtype} {value.shape} in the "
                "recorded forward; give it the same dtype and shape for all inputs of the same shapes."
            )

    def _rebuild(self, leaf: Leaf, arguments: list[Any]) -> Any:
        match leaf:
            case FromValue(number):
                return self._value(number)
            case FromArgument(position):
                return arguments[position]
            case FromParameter(name):
                return self._parameters[name]
            case Constant(content):
                return content
            case FreeTensor():
                raise AssertionError("an event makes values, never free tensors")

    def _value(self, number: int) -> Tensor:
        value = self.trace.values[number]
        if number in self._received:
            tensor = self._received[number]
            # a copy, because autograd forbids in-place writes to a leaf
            return tensor.clone() if value.rewritten else tensor
        grad = value.grad and torch.is_grad_enabled()
        return self._placeholders.give(value.shape, value.dtype).requires_grad_(grad)

    def _put(self, target: Tensor, number: int) -> None:
        """Writes the received value into the argument that the skipped event writes."""
        # in-place writes to a placeholder or a leaf are errors: allocate separate memory first
        if is_expanded(target) or target.is_leaf:
            target.requires_grad_(False)
            target.data = torch.empty(target.shape, dtype=target.dtype, device=target.device)
        target.copy_(self._received[number])
