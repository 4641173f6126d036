"""Every operator that is measured on the host at hand, its sizes, and inputs that it meets in a step."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from engine.kernels.dispatch import REFERENCE
from engine.kernels.ops.squared_norm import squared_norm
from engine.kernels.optim.host_update import update_adam_
from engine.kernels.optim.update_rules import AdamRule

POOL_ELEMENTS = 17 << 20
"""Of fp32: the four tensors of the largest update, and more than caches hold."""
LINE = 16
"""Elements of a line of a cache."""
ELEMENTS = (1 << 10, 1 << 14, 1 << 17, 1 << 19, 1 << 21)
WIDTHS = (64, 256, 1024)
LENGTHS = (32, 128, 512)
HEAD_WIDTHS = (32, 64, 128)
HEADS = 8
ROW = 512
"""Elements of a row of norms and softmaxes."""
OWNED = (1 << 14, 1 << 18, 1 << 20, 1 << 22)
"""Elements of a bucket that is updated."""

Inputs = tuple[Tensor, ...]


class OperandPool:
    """Random numbers in memory of which inputs are cut: nothing is drawn between measurements."""

    def __init__(self, elements: int = POOL_ELEMENTS) -> None:
        self._numbers = torch.empty(elements)
        self._next = 0
        self.refill()

    def refill(self) -> None:
        """Draw all numbers anew, since an update writes into its inputs."""
        self._numbers.uniform_()

    def rewind(self) -> None:
        """What is taken next lies at the start again."""
        self._next = 0

    def take(self, *shape: int) -> Tensor:
        """A tensor that lies behind the one before; behind the last number comes the first.

        Lines between them keep tensors of equal size from the same place of a page, as an allocator does.
        """
        count = math.prod(shape)
        if self._next + count > len(self._numbers):
            self._next = 0
        begin = self._next
        self._next += (count // LINE + 2) * LINE
        return self._numbers[begin : begin + count].view(shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredOperator:
    """An operator to measure at all combinations of some sizes."""

    sizes: tuple[tuple[int, ...], ...]
    make: Callable[..., Inputs]
    """The inputs of one call, from the pool and a size of each direction."""
    call: Callable[..., Any]
    share: float = 1.0
    """Part of a call that the table counts as one."""


def measured_operators() -> Iterator[tuple[str, MeasuredOperator]]:
    """Every table of the step model, by name."""
    for layouts in ("nt", "nn", "tn"):
        yield f"product {layouts}", MeasuredOperator(sizes=(WIDTHS,) * 3, make=_factors(layouts), call=torch.mm)
    for causal, name in ((True, "causal attention"), (False, "attention")):
        sizes = (LENGTHS, HEAD_WIDTHS)
        forward = MeasuredOperator(sizes=sizes, make=_heads, call=_attend(causal), share=1 / HEADS)
        yield name, forward
        yield (
            f"{name} backward",
            MeasuredOperator(sizes=sizes, make=_attended, call=_attend_back(causal), share=1 / HEADS),
        )
    for name, (make, call) in _PASSES.items():
        yield name, MeasuredOperator(sizes=(ELEMENTS,), make=make, call=call)
    yield "squared norm", MeasuredOperator(sizes=(OWNED,), make=_flat(1), call=_squared_norm)
    yield "update", MeasuredOperator(sizes=(OWNED,), make=_flat(4), call=_update)  # last: it writes into the pool


def _flat(count: int) -> Callable[[OperandPool, int], Inputs]:
    return lambda pool, elements: tuple(pool.take(elements) for _ in range(count))


def _rows(count: int) -> Callable[[OperandPool, int], Inputs]:
    return lambda pool, elements: tuple(pool.take(elements // ROW, ROW) for _ in range(count))


def _factors(layouts: str) -> Callable[[OperandPool, int, int, int], Inputs]:
    def make(pool: OperandPool, rows: int, inner: int, columns: int) -> Inputs:
        return (
            pool.take(inner, rows).t() if layouts[0] == "t" else pool.take(rows, inner),
            pool.take(columns, inner).t() if layouts[1] == "t" else pool.take(inner, columns),
        )

    return make


def _heads(pool: OperandPool, length: int, width: int) -> Inputs:
    """As models make them: the heads of a row of tokens lie side by side."""
    return tuple(pool.take(1, length, HEADS, width).transpose(1, 2) for _ in range(3))


def _attend(causal: bool) -> Callable[..., Tensor]:
    return lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, is_causal=causal)


def _attended(pool: OperandPool, length: int, width: int) -> Inputs:
    """Inputs, results and a gradient of an attention; results lie as its forward leaves them."""
    out, grad = (pool.take(1, length, HEADS, width).transpose(1, 2) for _ in range(2))
    return *_heads(pool, length, width), out, pool.take(1, length, HEADS).transpose(1, 2), grad


def _attend_back(causal: bool) -> Callable[..., Any]:
    back = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return lambda q, k, v, out, sums, grad: back(grad, q, k, v, out, sums, 0.0, causal)


_RULE = AdamRule(lr=1e-4, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01, decoupled=True, bias_correction=True)


def _update(weight: Tensor, grad: Tensor, first: Tensor, second: Tensor) -> None:
    grad.mul_(0.999)  # clipping
    update_adam_([weight], [grad], [first], [second], 10, _RULE)


def _squared_norm(x: Tensor) -> Tensor:
    return squared_norm([(x, True)], REFERENCE)


def _norm(x: Tensor) -> Any:
    return torch.native_layer_norm(x, [ROW], x[0], x[0], 1e-5)


def _norm_back(grad: Tensor, x: Tensor) -> Any:
    edge = x[:, :1]
    return torch.ops.aten.native_layer_norm_backward(grad, x, [ROW], edge, edge, x[0], x[0], [True, True, True])


def _table(pool: OperandPool, elements: int) -> Inputs:
    """A table of as many elements as are looked up."""
    rows = max(1, elements // ROW)
    return pool.take(rows, ROW), torch.randint(rows, (rows,))


def _looked_up(pool: OperandPool, elements: int) -> Inputs:
    """Gradients and a table that together have ``elements``."""
    rows = max(1, elements // ROW // 2)
    return pool.take(rows, ROW), torch.randint(rows, (rows,))


def _embed_back(grad: Tensor, places: Tensor) -> Tensor:
    return torch.ops.aten.embedding_dense_backward(grad, places, len(grad), -1, False)  # type: ignore[no-any-return]


_ATEN = torch.ops.aten
_PASSES: Mapping[str, tuple[Callable[[OperandPool, int], Inputs], Callable[..., Any]]] = MappingProxyType({
    "add": (_flat(2), torch.add),
    "copy": (_flat(1), torch.clone),
    "fill": (_flat(1), torch.zeros_like),
    "sum": (_rows(1), lambda x: x.sum(0)),
    "dropout": (_flat(1), lambda x: torch.native_dropout(x, 0.1, True)),
    "tanh": (_flat(1), torch.tanh),
    "gelu": (_flat(1), lambda x: functional.gelu(x, approximate="tanh")),
    "gelu backward": (_flat(2), lambda grad, x: _ATEN.gelu_backward(grad, x, approximate="tanh")),
    "silu": (_flat(1), functional.silu),
    "silu backward": (_flat(2), _ATEN.silu_backward),
    "layer norm": (_rows(1), _norm),
    "layer norm backward": (_rows(2), _norm_back),
    "softmax": (_rows(1), lambda x: torch.softmax(x, -1)),
    "softmax backward": (_rows(2), lambda grad, y: _ATEN._softmax_backward_data(grad, y, -1, torch.float32)),
    "log softmax": (_rows(1), lambda x: torch.log_softmax(x, -1)),
    "log softmax backward": (_rows(2), lambda grad, y: _ATEN._log_softmax_backward_data(grad, y, -1, torch.float32)),
    "embedding": (_table, lambda table, places: functional.embedding(places, table)),
    "embedding backward": (_looked_up, _embed_back),
})  # fmt: skip
"""Table -> inputs of so many elements, and the operator."""
