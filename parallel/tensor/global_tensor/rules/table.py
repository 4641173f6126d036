"""Table of the rule of each torch function; built once.

The arguments of functions without a rule are gathered on every rank, and the function is recorded. Functions that write
into a global tensor, expose the memory, or hook the gradient are refused instead.
"""

from typing import TYPE_CHECKING, Any

from engine.parallel.tensor.global_tensor.global_tensor import (
    Function,
    GlobalTensor,
    LocalOnlyError,
    global_tensors_in,
)
from engine.parallel.tensor.global_tensor.redistribute import full
from engine.parallel.trace.torch_function import function_name, writes_in_place

if TYPE_CHECKING:
    from engine.parallel.tensor.global_tensor.context import GlobalTensorContext
from collections.abc import Iterator, Mapping
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn import functional

from engine.kernels.device import ACCELERATORS
from engine.kernels.ops.activations import activate, gated
from engine.kernels.ops.embedding import look_up_rows
from engine.kernels.ops.flex_attention import attend_flex
from engine.kernels.ops.linear import linear as fused
from engine.kernels.ops.norm import add_norm, norm
from engine.kernels.ops.rotary import rotary
from engine.parallel.tensor.global_tensor.context import GlobalTensorContext, Rules, TensorRule
from engine.parallel.tensor.global_tensor.rules import (
    attention,
    elementwise,
    flex,
    matmul,
    metadata,
    norms,
    reductions,
    shapes,
    slicing,
)
from engine.parallel.tensor.tp_axis import TensorAxis
from engine.parallel.trace.torch_function import getter

_MEMORY = frozenset((
    "data_ptr", "untyped_storage", "storage", "storage_offset", "_typed_storage", "share_memory_", "set_",
    "__dlpack__", "as_strided", "register_hook", "register_post_accumulate_grad_hook", "grad",
))  # fmt: skip


def gathered(context: "GlobalTensorContext", func: Function, *args: Any, **kwargs: Any) -> Any:
    """Gathers all global tensor arguments over their axis, then runs ``func``, a torch function without a rule, on
    them.

    Raises:
        LocalOnlyError: ``func`` writes into a global tensor, or reads its memory.
    """
    name = function_name(func)
    if name in _MEMORY or any(True for _ in global_tensors_in(_written(name, args, kwargs), {})):
        raise LocalOnlyError(
            f"{name} was called on a tensor {list(next(global_tensors_in(args, kwargs)).full)} "
            "that is sharded over tensor ranks, but it needs the memory of the full tensor; "
            f"use a function that returns a new tensor, or set {_whole_again(context)}."
        )
    return func(*_plain(args, name), **_plain(kwargs, name))


def _whole_again(context: "GlobalTensorContext") -> str:
    """Returns the setting with which this tensor is full on all ranks."""
    if context.sequence:
        return "parallel.sequence_parallel to false"
    return 'the style "replicate" for this module in parallel.tensor_plan'


def _written(name: str, args: Any, kwargs: Any) -> list[Any]:
    written = [kwargs.get("out"), kwargs.get("inputs")]  # backward writes the .grad of inputs=
    if args and (writes_in_place(name) or name.startswith("set ") or kwargs.get("inplace") is True):
        written.append(args[0])
    return written


def _plain(value: Any, name: str) -> Any:
    if type(value) is GlobalTensor:
        return full(value, name)
    if isinstance(value, list | tuple):
        plain = [_plain(inner, name) for inner in value]
        return type(value)(*plain) if hasattr(value, "_fields") else type(value)(plain)
    if isinstance(value, dict):
        return {key: _plain(inner, name) for key, inner in value.items()}
    return value


_ELEMENTWISE = """
    abs absolute acos add addcdiv addcmul angle arccos arcsin arctan asin atan atan2 bitwise_and bitwise_not
    bitwise_or bitwise_xor ceil clamp clamp_max clamp_min clip clone contiguous copysign cos cosh deg2rad div
    divide double eq erf erfc erfinv exp exp2 expm1 float_power floor floor_divide fmax fmin fmod frac ge greater
    greater_equal gt half heaviside bfloat16 bool float int long isfinite isinf isnan ldexp le lerp less less_equal
    lgamma log log10 log1p log2 logaddexp logical_and logical_not logical_or logical_xor logit lt masked_fill
    maximum minimum mul multiply nan_to_num ne neg negative not_equal positive pow rad2deg reciprocal relu
    remainder round rsqrt rsub sigmoid sign sin sinc sinh sqrt square sub subtract tan tanh true_divide trunc xlogy
    hypot softplus __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __rdiv__
    __floordiv__ __rfloordiv__ __mod__ __rmod__ __pow__ __rpow__ __neg__ __pos__ __abs__ __invert__ __and__
    __rand__ __or__ __ror__ __xor__ __rxor__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__
"""
_FUNCTIONAL = """
    gelu silu relu relu6 elu selu celu leaky_relu mish hardtanh hardsigmoid hardswish logsigmoid softplus softsign
    sigmoid tanh tanhshrink hardshrink softshrink threshold
"""
_IN_PLACE = """
    abs_ add_ addcdiv_ addcmul_ ceil_ clamp_ clamp_max_ clamp_min_ copy_ cos_ div_ divide_ exp_ fill_ floor_ lerp_ log_
    logical_and_ logical_not_ logical_or_ masked_fill_ mul_ multiply_ nan_to_num_ neg_ pow_ reciprocal_ relu_ round_
    rsqrt_ sigmoid_ sin_ sqrt_ square_ sub_ subtract_ tanh_ true_divide_ zero_
    __iadd__ __isub__ __imul__ __itruediv__ __ipow__ __iand__ __ior__
"""
_IN_PLACE_FUNCTIONAL = "relu_ elu_ selu_ celu_ leaky_relu_ hardtanh_ threshold_"


def _named(*names: str) -> Iterator[Any]:
    """Yields the functions of torch and methods of tensors with these names."""
    for name in names:
        for owner in (Tensor, torch):
            if callable(found := getattr(owner, name, None)):
                yield found


def _in_functional(*names: str) -> Iterator[Any]:
    for name in names:
        for owner in (functional, torch._C._nn):
            if callable(found := getattr(owner, name, None)):
                yield found


def _answered() -> Iterator[tuple[TensorRule, Any]]:
    asked = "is_floating_point is_complex is_signed element_size get_device result_type is_contiguous is_inference"
    yield from ((metadata.of_part, function) for function in _named(*asked.split()))
    for name in "itemsize is_meta is_sparse layout is_quantized is_cpu is_nested".split():  # noqa: SIM905
        yield metadata.of_part, getter(name)
    likes = ("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "randint_like")
    news = ("new_zeros", "new_ones", "new_full", "new_empty", "new_tensor")
    yield from ((metadata.blank, function) for function in _named(*likes, *news))
    yield metadata.size_of, torch.numel
    yield metadata.strides, Tensor.stride
    yield metadata.gradient, getter("grad")
    yield from ((metadata.part_of, function) for function in (*_named("detach"), getter("data")))
    yield from ((metadata.tell_part, function) for function in (Tensor.retain_grad, Tensor.requires_grad_))
    yield metadata.register_hook, Tensor.register_hook


def _by_element() -> Iterator[tuple[TensorRule, Any]]:
    yield from ((elementwise.elementwise, function) for function in _named(*_ELEMENTWISE.split()))
    yield from ((elementwise.elementwise, function) for function in _in_functional(*_FUNCTIONAL.split()))
    yield from ((elementwise.in_place, function) for function in _named(*_IN_PLACE.split()))
    yield from ((elementwise.in_place, function) for function in _in_functional(*_IN_PLACE_FUNCTIONAL.split()))
    yield from ((elementwise.cast_like, function) for function in _named("to", "type", "type_as", "cpu", *ACCELERATORS))
    yield from ((elementwise.where, function) for function in _named("where"))
    yield from ((elementwise.dropout, function) for function in (functional.dropout, functional.alpha_dropout))
    yield from ((elementwise.dropout_, function) for function in (torch.dropout, torch.alpha_dropout))


def _shaped() -> Iterator[tuple[TensorRule, Any]]:
    for rule, names in (
        (shapes.reshape, ("view", "reshape")),
        (shapes.reshape_as, ("view_as", "reshape_as")),
        (shapes.permute, ("permute",)),
        (shapes.transpose, ("transpose", "swapaxes", "swapdims")),
        (shapes.last_two, ("t", "adjoint")),
        (shapes.movedim, ("movedim", "moveaxis")),
        (shapes.flatten, ("flatten", "ravel")),
        (shapes.unflatten, ("unflatten",)),
        (shapes.unsqueeze, ("unsqueeze",)),
        (shapes.squeeze, ("squeeze",)),
        (shapes.expand, ("expand", "broadcast_to")),
        (shapes.expand_as, ("expand_as",)),
        (shapes.repeat, ("repeat",)),
        (shapes.tile, ("tile",)),
        (shapes.repeat_interleave, ("repeat_interleave",)),
        (slicing.narrow, ("narrow",)),
        (slicing.select, ("select",)),
        (slicing.unbind, ("unbind",)),
        (slicing.split, ("split", "split_with_sizes")),
        (slicing.chunk, ("chunk",)),
        (slicing.tensor_split, ("tensor_split",)),
        (slicing.getitem, ("__getitem__",)),
        (slicing.index_select, ("index_select",)),
        (slicing.cat, ("cat", "concat", "concatenate")),
        (slicing.stack, ("stack",)),
    ):
        yield from ((rule, function) for function in _named(*names))
    yield slicing.split, torch.functional.split
    yield shapes.last_two, getter("mT")
    yield shapes.reversed_dims, getter("T")


def _multiplied() -> Iterator[tuple[TensorRule, Any]]:
    yield matmul.linear_rule, functional.linear
    yield matmul.fused_linear, fused
    yield from ((matmul.matmul, function) for function in _named("matmul", "mm", "bmm", "mv", "dot", "__matmul__"))
    yield matmul.rmatmul, Tensor.__rmatmul__
    yield from ((matmul.addmm, function) for function in _named("addmm", "baddbmm", "addmv"))
    yield from ((matmul.einsum, function) for function in (torch.einsum, torch.functional.einsum))
    grouped = (getattr(torch, "_grouped_mm", None), getattr(functional, "grouped_mm", None))
    yield from ((matmul.grouped_mm, function) for function in grouped if function is not None)
    yield matmul.embedding, functional.embedding
    yield matmul.added_rows, look_up_rows
    yield attention.attention_rule, functional.scaled_dot_product_attention
    yield flex.flex_rule, attend_flex
    yield attention.multi_head, functional.multi_head_attention_forward


def _reduced() -> Iterator[tuple[TensorRule, Any]]:
    keep = ("softmax", "log_softmax", "cumsum", "cumprod", "logcumsumexp")
    yield from ((reductions.along, function) for function in _named(*keep))
    yield from ((reductions.along, function) for function in _in_functional("softmax", "log_softmax", "softmin"))
    yield from ((reductions.roll, function) for function in _named("roll"))
    yield from ((reductions.flip, function) for function in _named("flip"))
    yield from ((reductions.corner, function) for function in _named("tril", "triu"))
    yield reductions.pad, functional.pad
    less = ("amax", "amin", "max", "min", "argmax", "argmin", "logsumexp", "any", "all", "median")
    yield from ((reductions.reduced, function) for function in _named(*less))
    yield from ((reductions.extremes, function) for function in _named("aminmax"))
    yield from ((reductions.vector_norm_rule, function) for function in _named("norm"))
    yield reductions.vector_norm, torch.linalg.vector_norm
    yield from ((reductions.topk, function) for function in _named("topk"))
    yield from ((reductions.total, function) for function in _named("sum", "mean"))
    yield from ((reductions.variance, function) for function in _named("var", "std"))
    yield from ((norms.layer_norm, function) for function in (functional.layer_norm, torch.layer_norm))
    yield from ((norms.rms_norm, function) for function in (functional.rms_norm, torch.rms_norm))


def _own() -> Iterator[tuple[TensorRule, Any]]:
    yield from ((elementwise.elementwise, function) for function in (gated, activate))
    yield from ((norms.norm_rule, norm), (norms.add_norm_rule, add_norm), (attention.rotary_rule, rotary))


def _table() -> Mapping[Any, TensorRule]:
    parts = (_answered(), _by_element(), _shaped(), _multiplied(), _reduced(), _own())
    return MappingProxyType({function: rule for part in parts for rule, function in part})


TENSOR_RULES = Rules(by_function=_table(), fallback=gathered)


def global_context(axis: TensorAxis, sequence: bool = False, regather: bool = False) -> GlobalTensorContext:
    """Returns a new context for global tensors over ``axis``, with the rules of all supported functions.

    ``sequence``: True for sequence parallelism. ``regather``: True gathers the inputs of column layers again in
    backward, instead of storing them.
    """
    return GlobalTensorContext(axis, TENSOR_RULES, sequence, regather)
