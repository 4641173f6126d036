"""Weights to which code adds something for the length of a call, as PEFT does for stacks of experts.

    ParamWrapper.forward    torch.nn.utils.parametrize puts W + B A in the place of W, and removes it afterwards

Putting it on sets W to itself. No value changes, but torch counts a write, which ZeRO 3 refuses in gathered weights,
and detaches W from graphs of earlier calls. Removing it registers the module's answer for W, which need not be the
parameter (a matrix of codes), and registers it last. Here W is left alone, and the module gets its parameters back.
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
    """Leaves modules as they were by a call with adapters of their parameters."""
    for module in model.modules():
        if _adapts(module):
            with patches.changing(module, PatchLayer.GATHER, "adds an adapter to a weight, which counts as no write"):
                object.__setattr__(module, _PUT_ON, MethodType(_put_on, module))


def adapted_modules(model: nn.Module) -> set[nn.Module]:
    """Returns the modules with parameters to which adapters add something during a call."""
    adapters: Iterable[Any] = filter(_adapts, model.modules())
    return {adapter.get_base_layer() for adapter in adapters}


def _adapts(module: nn.Module) -> bool:
    return hasattr(module, _PUT_ON) and isinstance(getattr(module, "parameter_name", None), str)


@contextmanager
def unchanged_by_itself(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Inside, setting one of ``tensors`` to itself does nothing."""
    shadowed: list[Any] = list(tensors)
    for tensor in shadowed:
        tensor.set_ = partial(_set, tensor)  # neither function modes nor subclasses see this method
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
