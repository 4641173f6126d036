"""Guard of gradients: an error in place of None for code that reads a gradient on its parameter.

    forward            | backward                      | until step(), zero_grad() or the next forward
    plain parameters   | gradients move into buckets,  | guarded: to read, write or delete ``p.grad`` raises,
                       | p.grad is None again          | since None would let clipping find nothing

A parameter with values elsewhere (a shard under ZeRO 3, another stage's) is guarded too, so that every rank
refuses the same code. The objects stay the user's; only their class changes and changes back, so that nothing stands
between torch and a parameter while the model runs.

Notices a backward that the user starts himself, and keeps the engine's context of it open until it ends.

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
"""Returns the context of a backward that begins now; None if the engine does not use its gradients."""


class UserBackward:
    """Backward of the user's own that runs at present."""

    def __init__(self) -> None:
        self._enter: weakref.WeakMethod[Enter] | None = None
        self._context: AbstractContextManager[None] | None = None

    def serve(self, enter: Enter) -> None:
        """Calls ``enter``, a method, for the context of every backward from now on, as long as its object lives.

        Hooks on parameters refer to this object, and the garbage collector does not look into all of them: through a
        strong reference they would keep a dropped engine alive if the loss refers to it.
        """
        self._enter = weakref.WeakMethod(enter)

    def start(self) -> None:
        """Begins a backward when a gradient arrives. Hooks of autograd call it while no backward is known."""
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
        """Closes the context of a backward that has raised; returns True if there was one."""
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
    """Returns the ``grad`` of a parameter, guarded or not."""
    return _GRAD.__get__(parameter)  # type: ignore[no-any-return]


def set_plain_grad(parameter: Tensor, grad: Tensor | None) -> None:
    """Sets the ``grad`` of a parameter, guarded or not."""
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
    """Guards the ``grad`` of parameters while their gradients wait for a step."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        """Takes ``parameters``: all trained ones; ones of other stages require no gradient here."""
        self._parameters = tuple(parameters)
        self._absent = {id(parameter) for parameter in self._parameters if not parameter.requires_grad}
        self._guarded: list[nn.Parameter] = []
        self._drop: weakref.WeakMethod[Callable[[], None]] | None = None

    def set(self) -> None:
        """Guards every trained parameter of torch's own class, and every one on another stage."""
        if not self._guarded:
            trained = (p for p in self._parameters if p.requires_grad or id(p) in self._absent)
            self._guarded = [p for p in trained if type(p) in _TAKEN]
            for parameter in self._guarded:
                parameter.__class__ = _TAKEN[type(parameter)]

    def serve(self, drop: Callable[[], None]) -> None:
        """Calls ``drop``, a method, in ``zero_grad`` of the model from now on, as long as its object lives."""
        self._drop = weakref.WeakMethod(drop)

    def take_zero_grad(self, model: nn.Module) -> Callable[[], None]:
        """Makes ``zero_grad`` of the model drop the engine's gradients too, until the returned function is called."""

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
        """Restores the class of the parameters."""
        guarded, self._guarded = self._guarded, []
        for parameter in guarded:
            parameter.__class__ = _OWN.get(type(parameter), type(parameter))
            if isinstance(parameter, AbsentParameter):  # it may have been concealed since
                own: Any = parameter._guard
                own.own_class = _OWN.get(own.own_class, own.own_class)
