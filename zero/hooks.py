"""Takes every gradient off its parameter the moment backward has made it."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from engine.errors import EngineError
from engine.zero.guard import ShardedParameter

Take = Callable[[str, Tensor], None]
"""Gets (parameter name, gradient), dense, in the parameter's shape; once for each time a backward gives one."""


class GradientHooks:
    """While ``backward`` is open, gradients go to ``take`` and none stays on a parameter."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], take: Take) -> None:
        self._parameters = tuple(parameters.values())
        self._take = take
        self._open = False
        self._handles = []
        for name, parameter in parameters.items():
            untyped: Any = parameter  # torch leaves the method untyped
            self._handles.append(untyped.register_post_accumulate_grad_hook(partial(self._arrive, name)))

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Around one backward. A ``grad`` that a backward of the user's own has left is put aside and put back."""
        users = [(p, p.grad) for p in self._parameters if p.grad is not None]
        for parameter, _ in users:
            parameter.grad = None
        self._open = True
        try:
            yield
        finally:
            self._open = False
            for parameter, grad in users:
                parameter.grad = grad

    def remove(self) -> None:
        """Take the hooks off the parameters."""
        for handle in self._handles:
            handle.remove()

    def _arrive(self, name: str, parameter: Tensor) -> None:
        if not self._open or parameter.grad is None:
            return  # a backward of the user's own: not our gradient
        if isinstance(parameter, ShardedParameter):
            raise EngineError(
                f"parameter {name!r} got a gradient while it was not gathered (ZeRO 3), so it is worth nothing: "
                "its module hides what it returns; return tensors, or lists, tuples, dicts or objects of tensors."
            )
        grad, parameter.grad = parameter.grad, None
        self._take(name, grad.to_dense() if grad.layout != torch.strided else grad)
