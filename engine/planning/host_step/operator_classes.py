"""Which table of seconds an operator of torch reads, and by which size. A new class needs a row here and a maker in
``launch/planner/calibration/operator_seconds.py``.

    product nt    x [m, k] times w' of a weight w [n, k], as forwards multiply; "tn" gives weight gradients, "nn" the
                  gradients of inputs. A letter tells how a factor lies in memory, t: as the transpose of what it is
    passes        by the elements of the largest tensor; sums of tensors by the bytes that they move
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from torch import Tensor

PRODUCTS: Mapping[str, int] = MappingProxyType({"mm": 0, "addmm": 1, "bmm": 0, "baddbmm": 1, "_grouped_mm": 0})
"""Operator -> number of tensors before its factors."""
ATTENTION: Mapping[bool, str] = MappingProxyType({True: "causal attention", False: "attention"})
PASSES: Mapping[str, str] = MappingProxyType({
    "gelu": "gelu", "gelu_backward": "gelu backward", "silu": "silu", "silu_backward": "silu backward",
    "tanh": "tanh", "sigmoid": "tanh", "exp": "tanh", "erf": "tanh", "cos": "tanh", "sin": "tanh", "log": "tanh",
    "native_layer_norm": "layer norm", "native_layer_norm_backward": "layer norm backward",
    "_fused_rms_norm": "layer norm", "_fused_rms_norm_backward": "layer norm backward",
    "_softmax": "softmax", "_softmax_backward_data": "softmax backward",
    "_log_softmax": "log softmax", "_log_softmax_backward_data": "log softmax backward",
    "embedding": "embedding", "embedding_dense_backward": "embedding backward",
    "sum": "sum", "mean": "sum", "native_dropout": "dropout", "bernoulli_": "dropout",
    "clone": "copy", "copy_": "copy", "_to_copy": "copy", "cat": "copy", "slice_backward": "copy",
    "select_backward": "copy", "constant_pad_nd": "copy", "index": "copy",
    "zeros": "fill", "zeros_like": "fill", "new_zeros": "fill", "zero_": "fill", "fill_": "fill", "full": "fill",
    "full_like": "fill", "ones": "fill", "ones_like": "fill", "nll_loss_backward": "fill", "arange": "fill",
})  # fmt: skip
"""Operator -> table; all others are sums of tensors."""
FREE = frozenset({
    "empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "_unsafe_view", "nll_loss_forward",
    "_assert_async", "lift_fresh",
})  # fmt: skip
"""Operators that move next to nothing."""
WIDTH = 4
"""Bytes of an element of fp32."""


def describe(name: str, given: Sequence[Tensor], made: Sequence[Tensor]) -> tuple[str, tuple[float, ...], float]:
    """(table, sizes, times) of one call of an operator; no table: it moves nothing.

    Args:
        name: without its overload.
        given: the tensors among its arguments.
        made: its results.
    """
    if name in FREE or not made:
        return "", (), 1.0
    if name in PRODUCTS:
        return _product(*given[PRODUCTS[name] :][:2])
    if name == "embedding_dense_backward":
        return "embedding backward", (float(given[0].numel() + made[0].numel()),), 1.0
    if name == "embedding":
        return "embedding", (float(made[0].numel()),), 1.0
    if name in PASSES:
        return PASSES[name], (float(max(each.numel() for each in (*given, *made))),), 1.0
    moved = sum(each.numel() * each.element_size() for each in (*given, *made))
    return "add", (moved / (3 * WIDTH),), 1.0


def is_kept(kind: str) -> bool:
    """Selective recomputation keeps the results of products and attention."""
    return kind.startswith("product") or kind in ATTENTION.values()


def _product(left: Tensor, right: Tensor) -> tuple[str, tuple[float, ...], float]:
    rows, inner, columns = left.shape[-2], left.shape[-1], right.shape[-1]
    layouts = _layout(left) + _layout(right)
    times = float(left.shape[0]) if left.dim() == 3 else 1.0
    return f"product {'tn' if layouts == 'tt' else layouts}", (float(rows), float(inner), float(columns)), times


def _layout(factor: Tensor) -> str:
    return "t" if factor.stride(-2) == 1 and factor.stride(-1) != 1 else "n"
