"""Weights to which code adds something for the length of a call, as PEFT does for stacks of experts.

    ParamWrapper.forward    torch.nn.utils.parametrize puts W + B A in the place of W, and removes it afterwards

Putting it on sets W to itself, which torch counts as a write though no value changes, and ZeRO 3 refuses writes into
gathered weights. Removing it registers what the module answers as W, which need not be the parameter (a matrix of
codes), and registers it last. Here the count and the module's own parameters are put back.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import nn

from engine.parallel.model.forward_patch import ForwardPatches, PatchLayer

_PUT_ON = "_activate_lora"
"""PEFT's context around the call of a module with an adapter of one of its parameters, ``parameter_name``."""


def keep_parameters(model: nn.Module, patches: ForwardPatches) -> None:
    """Leave modules as they were by a call with adapters of their parameters."""
    for module in model.modules():
        if hasattr(module, _PUT_ON) and isinstance(getattr(module, "parameter_name", None), str):
            with patches.changing(module, PatchLayer.GATHER, "adds an adapter to a weight, which counts as no write"):
                object.__setattr__(module, _PUT_ON, MethodType(_put_on, module))


@contextmanager
def _put_on(module: Any, adapters: Sequence[str]) -> Iterator[None]:
    held: dict[str, Any] = module.get_base_layer()._parameters
    before, parameter = dict(held), held.get(module.parameter_name)
    version = None if parameter is None else parameter._version
    try:
        with getattr(type(module), _PUT_ON)(module, adapters):
            if version is not None:
                torch._C._autograd._unsafe_set_version_counter((parameter,), (version,))
            yield
    finally:
        held.clear()
        held.update(before)
