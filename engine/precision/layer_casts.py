"""Casts of inputs to the dtype of a layer's parameters in a 16-bit run, in place of a cast at the door of the model.

    999.3 --> the model's own code, in fp32 --> | to bf16 -> nn.Linear with bf16 parameters | --> bf16

torch computes a linear layer, a convolution or a normalization in one dtype. A model that computes with fp32 inputs or
buffers hands fp32 tensors to such layers, so these layers cast them (FSDP2: ``cast_forward_inputs`` of each wrapped
module; torch.autocast: casts of each operator). Layers that the model marks as fp32 cast 16-bit inputs to fp32. Modules
whose forward is the user's own get what they are given.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from engine.parallel.model.forward_patch import ForwardPatches, PatchLayer
from engine.parallel.tensor.deferred_linear import is_conv1d
from engine.precision.fp32_modules import KeptFp32, keep_in_fp32

_WIDE = (torch.float32, torch.float64)


def put_casts(model: nn.Module, kept: KeptFp32, compute: torch.dtype | None, patches: ForwardPatches) -> None:
    """Put every cast of a 16-bit run on the modules of ``model``; do nothing if ``compute`` is None."""
    if compute is None:
        return
    keep_in_fp32(model, kept.modules, compute, patches)
    for layer, names in _torch_layers(model):
        if kept.tensors.isdisjoint(names):
            _cast_inputs(layer, _WIDE, compute, patches)
        elif kept.marked.issuperset(names):
            _cast_inputs(layer, (compute,), torch.float32, patches)


def _torch_layers(model: nn.Module) -> Iterator[tuple[nn.Module, list[str]]]:
    """The layers of torch's own that have parameters, with the names of these."""
    for path, module in model.named_modules():
        names = [f"{path}.{name}" if path else name for name, p in module._parameters.items() if p is not None]
        if names and _is_torch_layer(module):
            yield module, names


def _is_torch_layer(module: nn.Module) -> bool:
    """Whether the forward is torch's own, or that of a layer which the engine has put in its place."""
    own = (base for base in type(module).__mro__ if "forward" in vars(base))
    owner = next(base for base in own if not base.__module__.startswith("engine."))
    return owner is not nn.Module and (owner.__module__.startswith("torch.nn.") or is_conv1d(module))


def _cast_inputs(layer: nn.Module, given: tuple[torch.dtype, ...], dtype: torch.dtype, patches: ForwardPatches) -> None:
    """Let ``layer`` cast inputs of the dtypes ``given`` to ``dtype``."""
    short = str(dtype).removeprefix("torch.")
    forward = _casting(vars(layer).get("forward"), given, dtype)
    patches.replace_forward(layer, PatchLayer.FP32, forward, f"casts inputs to {short}, the dtype of its parameters")


def _casting(own: Callable[..., Any] | None, given: tuple[torch.dtype, ...], dtype: torch.dtype) -> Callable[..., Any]:
    def cast(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) and value.dtype in given else value

    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # look the forward up in every call, because tensor parallelism changes the class
        run = own or type(module).forward.__get__(module)
        if len(args) == 1 and not kwargs and isinstance(args[0], Tensor):
            return run(cast(args[0]))
        inputs, options = pytree.tree_map(cast, (args, kwargs))
        return run(*inputs, **options)

    return forward
