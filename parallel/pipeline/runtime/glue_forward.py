"""Tier 2 of a stage's forward: every operation between calls that touches a value is compared with the trace by name.

    this stage needs it      it runs; values that other stages receive are kept
    it was received          the received value takes its place
    neither                  it is skipped; if it draws random numbers, they are drawn, so that streams stay equal

Free operations are not compared: their path may depend on the content of the batch (a padding mask may be full or not).
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode_temporarily
from torch.utils._pytree import tree_map

from engine.errors import EngineError
from engine.parallel.model.placeholders import is_plain
from engine.parallel.pipeline.runtime.stage_forward import StageForward, leaves_of
from engine.parallel.trace.model_trace import FromArgument, FromValue, Recipe
from engine.parallel.trace.torch_function import Function, Operation, functions_shown_to, user_place, wrapper_among

_MODULE_BACKWARD_HOOK = "apply:BackwardHookFunction"


class GlueForward(StageForward, TorchFunctionMode):
    """A stage's forward that decides on each operation between calls."""

    def _prepare(self) -> None:
        TorchFunctionMode.__init__(self)
        self._operations = 0
        self._quiet = False
        self._here: dict[int, tuple[weakref.ref[Tensor], bool]] = {}
        """The tensor of a value, and whether it has content, by the tensor's id."""
        self._written: dict[int, tuple[torch.UntypedStorage, bool]] = {}
        """Storages that values were written to, and whether their content is here; kept, so that keys stay unique."""
        present = self.plan.parameters
        self._of_model = {id(parameter): name in present for name, parameter in self._parameters.items()}

    @contextmanager
    def watching(self) -> Iterator[None]:
        with functions_shown_to(self._show), self:
            yield

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        wrapper = wrapper_among(args, kwargs)
        if wrapper is not None:
            with self:
                return wrapper.__torch_function__(func, types, args, kwargs)
        return self._show(func, args, kwargs or {})

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

    @contextmanager
    def _in_unit(self) -> Iterator[None]:
        # popped if it is the innermost mode: operations inside the unit are faster, and a compiler sees no mode
        on_top = _get_current_function_mode() is self  # type: ignore[no-untyped-call]
        with super()._in_unit(), _pop_mode_temporarily() if on_top else nullcontext():
            yield

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """Context for the engine's own operations, which are not events of the program."""
        before, self._quiet = self._quiet, True
        try:
            yield
        finally:
            self._quiet = before

    def _check_event(self, event: int, what: str) -> None:
        if event != self._calls + self._operations:
            expected = self._expected()
            raise EngineError(
                f"the forward reaches {what} where its trace has {expected}: the code between units takes another "
                "path; let it depend on the shapes of the input only."
            )

    def _expected(self) -> str:
        if self._operations == len(self.trace.glue):
            return "no more operations"
        glue = self.trace.glue[self._operations]
        return f"{glue.name} at {glue.place}" if glue.calls_before == self._calls else "a call"

    def _show(self, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._quiet or self.inside:
            return function(*args, **kwargs)
        operation = Operation(function, args, kwargs)
        free = operation.is_metadata or operation.is_blank or not any(map(self._knows, operation.tensors))
        with self._aside():
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
        """True if a value or parameter has content here, False if it is a placeholder; None if the tensor is free."""
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
