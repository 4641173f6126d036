"""Guard of ``parameter.grad``: code that reads it gets an error that names the alternative, not None.

    forward            | backward                      | until step(), zero_grad() or the next forward
    plain parameters   | gradients move into buckets,  | guarded: to read, write or delete ``p.grad`` raises,
                       | p.grad is None again          | since None would let clipping find nothing

Parameters without full values on this rank (ZeRO 3, other stages) are guarded too, so that every rank refuses the same
code. Only the parameter's class changes, and is restored before the model runs.

Also detects a backward that the user starts, and keeps the engine's context open until its end:

    loss.backward()    | the first gradient arrives    | the others arrive    | autograd's final callback
                       | start: open the context       | are taken            | end: close the context

Autograd says nothing when a backward begins. Its final callback does not run if the backward raises.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, suppress
from types import MappingProxyType, MethodType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from engine.errors import EngineError
from engine.parallel.model.whole_sizes import PartParameter, WholeSizes
from engine.parallel.trace.absent_parameter import AbsentParameter


class _AbandonedError(Exception):
    """Closes the context of a backward that has raised."""


Enter = Callable[[], AbstractContextManager[None] | None]
"""Function that returns the context of a starting backward; None if the engine does not use its gradients."""


class UserBackward:
    """Handler of a ``loss.backward()`` that the user calls directly: it enters the engine's backward context, and exits
    it when this backward ends.
    """

    def __init__(self) -> None:
        self._enter: weakref.WeakMethod[Enter] | None = None
        self._context: AbstractContextManager[None] | None = None

    def serve(self, enter: Enter) -> None:
        """Sets the callback ``enter``, a bound method of the engine that returns the context for each later backward.
        Stores only a weak reference.
        """
        self._enter = weakref.WeakMethod(enter)

    def start(self) -> None:
        """Enters the engine's backward context until the running backward ends. Does nothing if the context is open."""
        enter = self._enter() if self._enter is not None else None
        if enter is None or self._context is not None:
            return
        context = enter()
        if context is None:
            return
        context.__enter__()
        self._context = context
        torch.autograd.Variable._execution_engine.queue_callback(self._end)

    def abandon(self) -> bool:
        """Exits the engine's backward context and returns True, if a failed backward has left it open. Returns False if
        no context is open, or while a backward is running.
        """
        context = self._context
        if context is None or torch._C._current_graph_task_id() != -1:
            return False
        self._context = None
        with suppress(_AbandonedError):
            context.__exit__(_AbandonedError, _AbandonedError("a backward of the user's own has raised"), None)
        return True

    def _end(self) -> None:
        context, self._context = self._context, None
        if context is not None:
            context.__exit__(None, None, None)


_GRAD: Any = Tensor.grad


def plain_grad(parameter: Tensor) -> Tensor | None:
    """Returns ``parameter.grad``, even while a :class:`GradientGuard` refuses normal access to it."""
    return _GRAD.__get__(parameter)  # type: ignore[no-any-return]


def set_plain_grad(parameter: Tensor, grad: Tensor | None) -> None:
    """Sets ``parameter.grad``, even while a :class:`GradientGuard` refuses normal access to it."""
    _GRAD.__set__(parameter, grad)


def _refuse(parameter: Tensor, *_: object) -> NoReturn:
    raise EngineError(
        f"param.grad was read or written (shape {list(parameter.shape)}), but the engine stores, sums and clips the "
        "gradient; read and write it with eng.gradients(), drop it with eng.zero_grad(), and clip with "
        "gradient_clipping."
    )


class _TakenGradient(nn.Parameter):
    """Parameter whose gradient the engine has taken."""

    # operations are those of any tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    grad = property(_refuse, _refuse, _refuse)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        copied = memo.get(id(self))
        if copied is None:
            copied = nn.Parameter(self.detach().clone(memory_format=torch.preserve_format), self.requires_grad)
            memo[id(self)] = copied
        return copied


class _TakenGradientElsewhere(AbsentParameter):
    """Parameter with its gradient in the engine, and without values on this rank."""

    grad = property(_refuse, _refuse, _refuse)


class _TakenPart(WholeSizes, _TakenGradient):
    """Parameter with its gradient in the engine, and a part of its values on this rank."""


_TAKEN: Mapping[type, type] = MappingProxyType(
    {nn.Parameter: _TakenGradient, PartParameter: _TakenPart, AbsentParameter: _TakenGradientElsewhere}
)
_OWN: Mapping[type, type] = MappingProxyType({taken: own for own, taken in _TAKEN.items()})


class GradientGuard:
    """Guard of ``param.grad``: access raises an EngineError while the gradients are in the engine's buckets."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        """Takes ``parameters``: all trained ones; ones of other stages require no gradient here."""
        self._parameters = tuple(parameters)
        self._absent = {id(parameter) for parameter in self._parameters if not parameter.requires_grad}
        self._guarded: list[nn.Parameter] = []
        self._drop: weakref.WeakMethod[Callable[[], None]] | None = None

    def set(self) -> None:
        """Guards every trainable parameter, including placeholders for parameters of other pipeline stages. Skips
        parameters of user-defined classes.
        """
        if not self._guarded:
            trained = (p for p in self._parameters if p.requires_grad or id(p) in self._absent)
            self._guarded = [p for p in trained if type(p) in _TAKEN]
            for parameter in self._guarded:
                parameter.__class__ = _TAKEN[type(parameter)]

    def serve(self, drop: Callable[[], None]) -> None:
        """Sets the callback ``drop``, a bound method that discards the engine's gradients. :meth:`take_zero_grad`
        patches ``model.zero_grad`` to call it. Stores only a weak reference.
        """
        self._drop = weakref.WeakMethod(drop)

    def take_zero_grad(self, model: nn.Module) -> Callable[[], None]:
        """Patches ``model.zero_grad`` to discard the engine's gradients too. Returns a function to undo this patch."""

        def zero_grad(module: nn.Module, set_to_none: bool = True) -> None:
            drop = self._drop() if self._drop is not None else None
            if module is model and drop is not None:
                drop()
            type(module).zero_grad(module, set_to_none)

        taken = MethodType(zero_grad, model)  # bound, so that a copy of the model has its own
        object.__setattr__(model, "zero_grad", taken)

        def give_back() -> None:
            if vars(model).get("zero_grad") is taken:
                object.__delattr__(model, "zero_grad")

        return give_back

    def lift(self) -> None:
        """Removes the guard: restores the original classes of the parameters, so that ``param.grad`` is accessible
        again.
        """
        guarded, self._guarded = self._guarded, []
        for parameter in guarded:
            parameter.__class__ = _OWN.get(type(parameter), type(parameter))
            if isinstance(parameter, AbsentParameter):  # it may have been concealed since
                own: Any = parameter._guard
                own.own_class = _OWN.get(own.own_class, own.own_class)
