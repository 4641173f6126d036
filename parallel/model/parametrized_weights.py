"""Weights to which other code adds a term during a call, as PEFT does for stacks of expert weights.

    ParamWrapper.forward    torch.nn.utils.parametrize replaces W by W + B A, and restores it afterwards

The registration calls ``W.set_(W)``, a write without a change, which ZeRO 3 refuses and which detaches W from earlier
graphs. The removal registers ``module.W``, possibly another tensor than the parameter, as the last parameter. This
module makes the write a no-op and restores the parameters in their order.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any

from torch import Tensor, nn

from engine.parallel.model.forward_patch import ForwardPatches, PatchLayer

_PUT_ON = "_activate_lora"
"""PEFT's context around the call of a module with an adapter of one of its parameters, ``parameter_name``."""


def keep_parameters(model: nn.Module, patches: ForwardPatches) -> None:
    """Makes PEFT's adapters of one parameter, such as a stack of expert weights, restore the parameter after each
    forward.

    The adapted module then has its original parameter objects, with unchanged version counters. Removal of ``patches``
    undoes this.
    """
    for module in model.modules():
        if _adapts(module):
            with patches.changing(module, PatchLayer.GATHER, "adds an adapter to a weight without a counted write"):
                object.__setattr__(module, _PUT_ON, MethodType(_put_on, module))


def outermost_adapters(model: nn.Module) -> dict[nn.Module, str]:
    """Returns, for each module with single parameters that PEFT adapts, the name of the outermost adapter around it."""
    found: dict[nn.Module, str] = {}
    for name, module in model.named_modules():
        if _adapts(module):
            found.setdefault(adapter_chain(module)[-1][1], name)
    return found


def adapter_chain(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Returns (prefix, module) for ``module``; if it is an adapter, also for its ``base_layer``, and so on inwards.

    A prefix is the path from ``module`` to the wrapped module, such as "base_layer.".
    """
    found = [("", module)]
    while _adapts(module) and isinstance(module.base_layer, nn.Module):
        module = module.base_layer
        found.append((f"{found[-1][0]}base_layer.", module))
    return found


def _adapts(module: nn.Module) -> bool:
    return hasattr(module, _PUT_ON) and isinstance(getattr(module, "parameter_name", None), str)


@contextmanager
def unchanged_by_itself(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Makes ``tensor.set_(tensor)`` do nothing inside the context, for each of ``tensors``."""
    shadowed: list[Any] = list(tensors)
    for tensor in shadowed:
        tensor.set_ = partial(_set, tensor)  # function modes and subclasses do not intercept instance attributes
    try:
        yield
    finally:
        for tensor in shadowed:
            del tensor.set_


def _set(tensor: Tensor, *source: Any) -> Tensor:
    return tensor if source[0] is tensor else Tensor.set_(tensor, *source)


@contextmanager
def _put_on(module: Any, adapters: Sequence[str]) -> Iterator[None]:
    held: dict[str, Any] = module.get_base_layer()._parameters
    before, own = dict(held), [p for name, p in held.items() if name == module.parameter_name and p is not None]
    try:
        with unchanged_by_itself(own), getattr(type(module), _PUT_ON)(module, adapters):
            yield
    finally:
        held.clear()
        held.update(before)
