"""Modules and tensors that stay in fp32 in a bf16 or fp16 model, and casts of inputs to the dtype of a layer.

    bf16  --> | to fp32 -> the module's own forward, parameters in fp32 -> to bf16 | --> bf16
    999.3 --> the model's own code, in fp32 --> | to bf16 -> nn.Linear with bf16 parameters | --> bf16

Modules that match ``keep_fp32``, with their submodules, and BatchNorm stay in fp32; their ``forward`` casts inputs and
outputs. Tensors that a model marks as fp32 itself (transformers: ``_keep_in_fp32_modules_strict``) get no such casts.

Linear layers, convolutions and norms cast their inputs to the dtype of their weights, because a model may compute with
fp32 inputs or buffers in between. Modules with a forward of the user receive their inputs unchanged.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from glob import escape
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from engine.errors import ConfigError
from engine.parallel.model.forward_patch import ForwardPatches, PatchLayer
from engine.parallel.model.name_patterns import is_inside, refuse_unmatched
from engine.parallel.tensor.deferred_linear import is_conv1d


@dataclass(frozen=True, slots=True)
class KeptFp32:
    """Names of modules that compute in fp32, and of parameters and buffers in fp32, in a bf16 or fp16 run."""

    modules: tuple[str, ...] = ()
    """Names of the outermost matching modules, each module once."""
    tensors: frozenset[str] = frozenset()
    """Names, with aliases, of parameters and buffers in these modules and of ``marked`` ones."""
    marked: frozenset[str] = frozenset()
    """Names of the parameters and buffers that the model marks as fp32 itself."""

    def within(self, module: str) -> "KeptFp32":
        """Returns the entries inside ``module``, with names relative to it."""

        def inside(names: Iterable[str]) -> Iterator[str]:
            return (name[len(module) + 1 :] for name in names if is_inside(name, module))

        return KeptFp32(tuple(inside(self.modules)), frozenset(inside(self.tensors)), frozenset(inside(self.marked)))


def find_fp32_modules(model: nn.Module, patterns: Sequence[str]) -> KeptFp32:
    """Returns the modules that match ``patterns`` (from ``keep_fp32``), with their parameters and buffers.

    Raises:
        ConfigError: a pattern matches no module, or a tensor is shared with a module that does not match.
    """
    named = {name: module for name, module in model.named_modules(remove_duplicate=False) if name}
    refuse_unmatched([(f"keep_fp32[{i}]", pattern) for i, pattern in enumerate(patterns)], list(named), "module")
    chosen = {name for name in named if any(fnmatchcase(name, pattern) for pattern in patterns)}
    roots = [name for name in chosen if not any(other != name and is_inside(name, other) for other in chosen)]
    objects = {id(named[name]): name for name in sorted(roots, reverse=True)}
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    inside = frozenset(name for name, _ in tensors if any(is_inside(name, root) for root in roots))
    _refuse_shared(tensors, inside)
    return KeptFp32(tuple(name for name in named if name in objects.values()), inside)


def marked_tensors(model: nn.Module, compute: torch.dtype) -> frozenset[str]:
    """Returns the names of parameters and buffers that the model's transformers class requires in fp32.

    The class lists them in ``_keep_in_fp32_modules_strict`` and, for fp16 only, in ``_keep_in_fp32_modules``. All names
    of a tied tensor are included.
    """
    lists = ["_keep_in_fp32_modules_strict"] + ["_keep_in_fp32_modules"] * (compute == torch.float16)
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    found: set[int] = set()
    for path, module in model.named_modules():
        patterns = [pattern.replace("*", ".*") for name in lists for pattern in getattr(module, name, None) or ()]
        if patterns:
            start, marks = len(f"{path}.") if path else 0, re.compile("|".join(patterns))
            found.update(id(t) for name, t in tensors if is_inside(name, path) and marks.search(name[start:]))
    return frozenset(name for name, tensor in tensors if id(tensor) in found)


def running_statistics(model: nn.Module) -> tuple[str, ...]:
    """Returns patterns of the names of modules with running statistics (BatchNorm), which a bf16 or fp16 run leaves in
    fp32.
    """
    named = model.named_modules(remove_duplicate=False)  # every name of a module, because all share its tensors
    return tuple(escape(name) for name, module in named if name and module._buffers.get("running_mean") is not None)


def _refuse_shared(tensors: Sequence[tuple[str, Tensor]], kept: frozenset[str]) -> None:
    first: dict[int, str] = {}
    for name, tensor in tensors:
        other = first.setdefault(id(tensor), name)
        if (name in kept) != (other in kept):
            inside, outside = (name, other) if name in kept else (other, name)
            raise ConfigError(
                f"keep_fp32: {inside!r} is the same tensor as {outside!r}, which is outside the modules kept in fp32; "
                "name both modules, or neither."
            )


def keep_in_fp32(model: nn.Module, names: Collection[str], compute: torch.dtype, patches: ForwardPatches) -> None:
    """Makes the modules ``names`` of ``model`` compute in fp32 until ``patches`` are removed.

    Inputs are cast from ``compute`` to fp32, and outputs back, except 0-dim outputs.
    """
    note = f"runs in fp32: inputs are cast from {str(compute).removeprefix('torch.')}, and outputs back"
    for module in map(model.get_submodule, names):
        wrapped = _in_fp32(module, vars(module).get("forward"), compute)
        patches.wrap_forward(module, PatchLayer.FP32, wrapped, note)


def _in_fp32(module: nn.Module, own: Callable[..., Any] | None, compute: torch.dtype) -> Callable[..., Any]:
    def widen(value: Any) -> Any:
        return value.float() if isinstance(value, Tensor) and value.dtype == compute else value

    def narrow(value: Any) -> Any:
        wide = isinstance(value, Tensor) and value.dtype == torch.float32 and value.dim() > 0
        return (
            value.to(compute) if wide else value
        )  # a 0-dim loss stays fp32: narrowing costs digits and saves no memory

    def forward(*args: Any, **kwargs: Any) -> Any:
        # look the forward up in every call, because tensor parallelism changes the class
        run = own or type(module).forward.__get__(module)
        inputs, options = pytree.tree_map(widen, (args, kwargs))
        return pytree.tree_map(narrow, run(*inputs, **options))

    return forward


_WIDE = (torch.float32, torch.float64)


def put_casts(model: nn.Module, kept: KeptFp32, compute: torch.dtype | None, patches: ForwardPatches) -> None:
    """Makes modules of ``model`` cast their inputs to the dtype in which they compute, until ``patches`` are removed.

    Modules of ``kept`` compute in fp32; torch's own layers outside them compute in the dtype of their parameters.
    ``compute``: bf16 or fp16; None: does nothing.
    """
    if compute is None:
        return
    keep_in_fp32(model, kept.modules, compute, patches)
    for layer, names in _torch_layers(model):
        if kept.tensors.isdisjoint(names):
            _cast_inputs(layer, _WIDE, compute, patches)
        elif kept.marked.issuperset(names):
            _cast_inputs(layer, (compute,), torch.float32, patches)


def _torch_layers(model: nn.Module) -> Iterator[tuple[nn.Module, list[str]]]:
    """Yields the layers of torch that have parameters, with the names of these."""
    for path, module in model.named_modules():
        names = [f"{path}.{name}" if path else name for name, p in module._parameters.items() if p is not None]
        if names and _is_torch_layer(module):
            yield module, names


def _is_torch_layer(module: nn.Module) -> bool:
    """Returns True if the forward is torch's own, or belongs to a layer that the engine put in its place."""
    own = (base for base in type(module).__mro__ if "forward" in vars(base))
    owner = next(base for base in own if not base.__module__.startswith("engine."))
    return owner is not nn.Module and (owner.__module__.startswith("torch.nn.") or is_conv1d(module))


def _cast_inputs(layer: nn.Module, given: tuple[torch.dtype, ...], dtype: torch.dtype, patches: ForwardPatches) -> None:
    """Lets ``layer`` cast inputs of the dtypes ``given`` to ``dtype``."""
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
