"""Autograd functions that methods of a model apply, run on each rank's positions where a trial permits it.

    SquareRoot.apply(x)    x [B, S, H] sharded along S  ->  SquareRoot.apply(x.local), sharded along S

torch does not let a tensor subclass replace ``apply``, so a copy of the method refers to a class of its own. A function
that treats positions one by one, in values and gradients, gets this rank's positions; another one refuses sharded
tensors as before.
"""

from collections.abc import Callable
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.autograd import Function

from engine.parallel.context.rows.call_forms import SeenCall, SeenTensor, SequenceSize, flatten_leaves
from engine.parallel.context.rows.rowwise import LocalCall
from engine.parallel.context.rows.rowwise_proof import ProvenForm, apart, prove_rowwise
from engine.parallel.tensor.global_tensor.global_tensor import GlobalTensor
from engine.parallel.tensor.global_tensor.index_sets import NoRuleError

FUNCTION = "function"
"""First entry of the key of a trial in the cache of a context."""


def is_custom(found: Any) -> TypeGuard[type[Function]]:
    """Returns True if ``found`` is an autograd function class that is part of neither torch nor the engine."""
    own = isinstance(found, type) and issubclass(found, Function)
    return own and found.__module__.split(".")[0] not in ("torch", "engine")


def follow_function(function: type[Function]) -> type[Function]:
    """Returns a subclass of ``function`` that runs on this rank's positions of sharded arguments.

    Its ``apply`` first tests by a trial run that ``function`` computes each position independently; if not, it calls
    ``function.apply`` with the unchanged arguments.
    """

    def apply(*args: Any) -> Any:
        try:
            call = _call(function, args)
        except NoRuleError:
            return function.apply(*args)  # type: ignore[no-untyped-call]
        return call.run(function.apply, training=True)

    return type(function.__name__, (function,), {"apply": staticmethod(apply), "__module__": function.__module__})


def _call(function: type[Function], args: tuple[Any, ...]) -> LocalCall:
    """Returns the call of ``function`` on this rank's positions.

    Raises:
        NoRuleError: no argument is sharded along positions alone, or no trial permits the call.
    """
    first = next((one for one in args if type(one) is GlobalTensor and any(one.sets)), None)
    if first is None or first.views.axis.name != "cp" or type(first.local) is GlobalTensor:  # over tensor ranks
        raise NoRuleError("no argument is sharded along positions.")
    key = (FUNCTION, function, tuple(_seen(one) if isinstance(one, Tensor) else repr(one) for one in args))
    size = SequenceSize(1 if first.sets[0] is not None else first.shape[0], first.shape[first.sets[0] is None])
    form = first.views.find(key, lambda: (_proven(function, args, size),))[0]
    call = None if form is None else LocalCall.of(form, first.views, args, {})
    if call is None:
        raise NoRuleError("no trial shows that the function treats positions one by one.")
    return call


def _seen(one: Tensor) -> SeenTensor:
    return SeenTensor(tuple(one.shape), one.dtype)


def _proven(function: type[Function], args: tuple[Any, ...], size: SequenceSize) -> ProvenForm | None:
    leaves, spec = flatten_leaves((args, {}))
    call = SeenCall(spec, tuple(_seen(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves))
    with apart():
        tried = (prove_rowwise(_Applied(function, domain), call, size) for domain in (Tensor.clone, torch.sigmoid))
        return next((form for form in tried if form is not None), None)


class _Applied(nn.Module):
    """Module that applies an autograd function to values of ``domain``, since a square root needs positive ones.

    It bypasses the ``apply`` of Python, which a trace watches.
    """

    def __init__(self, function: type[Function], domain: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._made: Callable[..., Any] = super(Function, function).apply  # type: ignore[misc]
        self._domain = domain

    def forward(self, *args: Any) -> Any:
        floats = (isinstance(one, Tensor) and one.is_floating_point() for one in args)
        return self._made(*(self._domain(one) if each else one for one, each in zip(args, floats, strict=True)))
