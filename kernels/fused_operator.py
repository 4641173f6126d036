"""Operators of this package: one node for the compiler and for dispatch modes, a plain call in eager mode.

``torch.library.custom_op`` gives torch.compile, selective recomputation and traces on fake tensors an operator that
they can name. Its way through the dispatcher costs about 50 us of host time for each call and 70 us for each backward,
more than the launch of the kernel itself. In eager mode nobody reads the name, so the same functions run as an
``autograd.Function``, or without one where no gradient is wanted.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

R = TypeVar("R")
_LAUNCHES: ContextVar[bool] = ContextVar("launches", default=False)
_PLAIN: Any = Tensor.__torch_dispatch__
"""Marks a tensor class that runs no Python code of its own below autograd."""


class FusedOperator(Generic[R]):
    """A function of tensors, registered with torch as ``name``.

    It takes positional arguments. It returns new tensors, apart from those named in ``mutates``, which it writes.
    """

    def __init__(self, name: str, function: Callable[..., R], mutates: Sequence[str]) -> None:
        self.registered = torch.library.custom_op(name, function, mutates_args=mutates)
        self._function = function
        self._written = [index for index, one in enumerate(inspect.signature(function).parameters) if one in mutates]
        self._differentiable: type[torch.autograd.Function] | None = None

    def register_fake(self, fake: Callable[..., R]) -> Callable[..., R]:
        """Register the function that makes outputs without content from inputs without content."""

        def on_shapes(*args: Any) -> R:
            if _LAUNCHES.get():
                with _disable_current_modes():
                    self._function(*map(_without_content, args))
            return fake(*args)

        self.registered.register_fake(on_shapes)
        return fake

    def register_autograd(self, gradients: Callable[..., Any], setup_context: Callable[..., Any]) -> None:
        """Register the backward: ``setup_context(ctx, inputs, output)``, then ``gradients(ctx, *slopes)``."""
        self.registered.register_autograd(gradients, setup_context=setup_context)
        function: Callable[..., R] = self._function

        class Eager(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *args: Any) -> R:
                output = function(*args)
                setup_context(ctx, args, output)
                return output

            @staticmethod
            def backward(ctx: Any, *slopes: Any) -> Any:
                return gradients(ctx, *slopes)

        self._differentiable = Eager

    def __call__(self, *args: Any) -> R:
        """Run the function on ``args``."""
        if torch.compiler.is_compiling() or _is_watched():
            return cast(R, self.registered(*args))
        differentiable = False
        for one in args:
            if isinstance(one, Tensor):
                if type(one).__torch_dispatch__ is not _PLAIN or one.is_meta:
                    return cast(R, self.registered(*args))
                differentiable = differentiable or one.requires_grad
        if differentiable and torch.is_grad_enabled():
            if self._differentiable is None:  # torch refuses the backward of this operator by its name
                return cast(R, self.registered(*args))
            return cast(R, self._differentiable.apply(*args))  # type: ignore[no-untyped-call]
        output = self._function(*args)
        for index in self._written:  # autograd compares versions of what it has saved; a kernel's write changes none
            torch.autograd.graph.increment_version(cast(Tensor, args[index]))
        return output


@contextmanager
def launching_on_shapes() -> Iterator[None]:
    """Inside, operators on shapes run their function too, on the meta device, so that its launches can be noted."""
    token = _LAUNCHES.set(True)
    try:
        yield
    finally:
        _LAUNCHES.reset(token)


def _without_content(given: Any) -> Any:
    """Return a tensor on the meta device that lies in memory as ``given`` does; anything else as it is."""
    if not isinstance(given, Tensor) or given.is_meta:
        return given
    storage = torch.empty(given.untyped_storage().nbytes() // given.element_size(), dtype=given.dtype, device="meta")
    return storage.as_strided(given.shape, given.stride(), given.storage_offset())


def fused_operator(name: str, mutates: Sequence[str] = ()) -> Callable[[Callable[..., R]], FusedOperator[R]]:
    """Register the decorated function as the operator ``name``; ``mutates`` names the arguments that it writes."""
    return lambda function: FusedOperator(name, function, mutates)


def _is_watched() -> bool:
    """Return whether a dispatch mode or a transform of torch.func has to see the call."""
    return bool(torch._C._len_torch_dispatch_stack() or torch._C._are_functorch_transforms_active())
