"""Calls of ``flex_attention`` in a model, which run through the engine's operator.

    flex_attention(q, k, v, ...)                          the global of a method, or of a function that it calls
    attend = torch.compile(flex_attention)                the same, compiled by the caller
    Attention.attend = torch.compile(flex_attention)      an attribute of a module or of its class
    attn_implementation="flex_attention"                  transformers' tables of attention and mask functions

``create_block_mask`` is replaced too: on shapes no mask exists, and the CPU does not compile its making.
"""

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from engine.kernels.device import find_accelerator, is_host
from engine.kernels.ops.flex_attention import FlexCall, attend_flex, build_block_mask
from engine.parallel.model.forward_patch import ForwardPatches, PatchLayer, with_globals
from engine.parallel.model.method_globals import class_values, replace_in_methods
from engine.parallel.trace.operation_meter import is_metered

_NOTE = "runs flex attention on the part of this rank"
_FLEX, _MASK, _FLEX_MODULE = "flex_attention", "create_block_mask", "torch.nn.attention.flex_attention"
_TABLES = frozenset(("AttentionInterface", "AttentionMaskInterface"))
"""Types of transformers' tables of functions by the name of an implementation."""
_OF_TRANSFORMERS = "compile_friendly_flex_attention"
"""Function of transformers that compiles and calls flex attention."""
_NAMES = ("score_mod", "block_mask", "scale", "enable_gqa", "return_lse", "kernel_options")


def redirect_flex(model: nn.Module, patches: ForwardPatches) -> None:
    """Makes the modules of ``model`` call the engine's flex attention operator in place of PyTorch's.

    The engine's operator can be traced, and accepts sharded tensors. Removal of ``patches`` undoes this.
    """
    if _FLEX_MODULE not in sys.modules:
        return
    listed = any(
        getattr(getattr(module, "config", None), "_attn_implementation", None) == _FLEX for module in model.modules()
    )
    replace_in_methods(model, patches, PatchLayer.KERNEL, _NOTE, lambda given: _replacement(given, listed), listed)
    static: dict[type, list[tuple[str, Callable[..., Any]]]] = {}
    for module in model.modules():
        found = dict(_attributes(module, static))
        if found:
            with patches.changing(module, PatchLayer.KERNEL, _NOTE):
                for name, run in found.items():
                    object.__setattr__(module, name, _operator(run))


def _plain(given: Any) -> Any:
    """Returns the function that a caller has compiled, or ``given`` itself."""
    return getattr(given, "_torchdynamo_orig_callable", given) if callable(given) else given


def _is_flex(given: Any) -> bool:
    """Returns True for torch's function, compiled or not, and for the one of transformers that calls it."""
    function = _plain(given)
    if isinstance(function, FunctionType) and function.__name__ == _OF_TRANSFORMERS:
        return (function.__module__ or "").startswith("transformers.")
    return function is getattr(sys.modules[_FLEX_MODULE], _FLEX)


def _operator_of(given: Any) -> Any:
    """Returns the operator for a function of flex attention; None for other values."""
    if _is_flex(given):
        return _operator(given)
    return _mask_maker(given) if _plain(given) is getattr(sys.modules[_FLEX_MODULE], _MASK) else None


def _replacement(given: Any, listed: bool) -> Any:
    """Returns the replacement of a global value; ``listed``: the model takes attention functions from tables."""
    if (made := _operator_of(given)) is not None:
        return made
    if isinstance(given, ModuleType):
        return _module(given) if given is sys.modules[_FLEX_MODULE] else given
    if listed and type(given).__name__ in _TABLES and _FLEX in given:
        return _table(given)
    if listed and isinstance(given, FunctionType) and given.__module__ == "transformers.masking_utils":
        found = given.__globals__.items()
        tables = {name: _table(table) for name, table in found if type(table).__name__ in _TABLES}
        return with_globals(given, tables)
    if isinstance(given, type) and issubclass(given, nn.Module):
        own = {name: _operator(found) for name, found in vars(given).items() if _is_flex(found)}
        return type(given.__name__, (given,), own) if own else given
    return given


@cache
def _operator(run: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function with the arguments of torch's that calls the engine's operator."""

    def flex_attention(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return run(query, key, value, *args, **kwargs)
        options = dict(zip(_NAMES, args, strict=False)) | kwargs
        named = {name: options.pop(name) for name in ("score_mod", "block_mask", "enable_gqa") if name in options}
        return attend_flex(query, key, value, FlexCall(run, **named, options=options))

    return flex_attention


@cache
def _mask_maker(run: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function with the arguments of torch's ``create_block_mask``."""
    signature = inspect.signature(_plain(run))

    def create_block_mask(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return run(*args, **kwargs)
        given = signature.bind(*args, **kwargs).arguments
        place = torch.empty(0, device=given.get("device") or find_accelerator() or "cpu")
        if place.is_meta or isinstance(place, FakeTensor) or is_metered():
            return _mask_on_shapes(given, place)
        if not is_host(place.device):
            return run(*args, **kwargs)
        given.pop("_compile", None)
        return _plain(run)(**given)

    return create_block_mask


def _mask_on_shapes(given: Mapping[str, Any], place: Tensor) -> Any:
    """Returns a mask all of whose blocks may have visible keys."""
    size = given.get("BLOCK_SIZE", 128)
    sizes = (size, size) if isinstance(size, int) else size
    lengths = given["Q_LEN"], given["KV_LEN"]
    rows, columns = (-(-length // one) for length, one in zip(lengths, sizes, strict=True))
    leading = given.get("B") or 1, given.get("H") or 1
    counts = place.new_full((*leading, rows), columns, dtype=torch.int32)
    listed = torch.arange(columns, dtype=torch.int32, device=place.device).expand(*leading, rows, columns)
    kind = sys.modules[_FLEX_MODULE].BlockMask
    return build_block_mask(kind, (counts, listed.contiguous()), sizes, given["mask_mod"], lengths)


def _module(given: ModuleType) -> ModuleType:
    """Returns torch's module with the operators in place of its functions."""
    made = ModuleType(given.__name__)
    vars(made).update(vars(given))
    vars(made).update({name: _operator_of(vars(given)[name]) for name in (_FLEX, _MASK)})
    return made


def _table(given: Any) -> Any:
    """Returns a table of transformers' functions in which flex attention and its mask are the operators."""
    made = type(given)()
    for name in given:
        made[name] = given[name]
    if isinstance(function := made[_FLEX], FunctionType):
        own = {name: own for name, found in function.__globals__.items() if (own := _operator_of(found)) is not None}
        made[_FLEX] = with_globals(function, own)
    return made


def _attributes(
    module: nn.Module, static: dict[type, list[tuple[str, Callable[..., Any]]]]
) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yields the attributes of a module, and static ones of its class, that are flex attention.

    ``static``: those of the classes seen so far.
    """
    yield from ((name, found) for name, found in vars(module).items() if callable(found) and _is_flex(found))
    owner = type(module)
    if owner not in static:
        values = ((name, each.__func__) for name, each in class_values(owner) if isinstance(each, staticmethod))
        static[owner] = [(name, found) for name, found in values if _is_flex(found)]
    yield from ((name, found) for name, found in static[owner] if name not in vars(module))
