"""Seconds of operators on the host at hand by class and size, as a step meets them: inputs that no cache holds, results
that stay.

All ranks measure at once, so that they share caches and memory as in a run.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from math import ceil
from statistics import median
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from engine.kernels.dispatch import REFERENCE
from engine.kernels.ops.squared_norm import squared_norm
from engine.kernels.optim.update_rules import AdamRule, adam_
from engine.planning.host_step.host_rates import SecondsTable

POOL_BYTES = 32 << 20
"""Of the inputs of one measurement together."""
MOST_CALLS = 64
REPEATS = 3
ROUND_SECONDS = 0.03
"""About, of a round of calls."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredOperator:
    """An operator to measure at all combinations of some sizes."""

    sizes: tuple[tuple[int, ...], ...]
    make: Callable[..., Inputs]
    """The inputs of one call, from a size of each direction."""
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
            MeasuredOperator(sizes=sizes, make=_attended(causal), call=_attend_back(causal), share=1 / HEADS),
        )
    for name, (make, call) in _PASSES.items():
        yield name, MeasuredOperator(sizes=(ELEMENTS,), make=make, call=call)
    yield "update", MeasuredOperator(sizes=(OWNED,), make=_flat(4), call=_update)
    yield (
        "squared norm",
        MeasuredOperator(sizes=(OWNED,), make=_flat(1), call=lambda x: squared_norm([(x, True)], REFERENCE)),
    )


def measure_operator(operator: MeasuredOperator, ready: Callable[[], None]) -> SecondsTable:
    """Seconds at every combination of sizes; ``ready`` waits for the other ranks before each."""
    seconds = []
    for chosen in product(*operator.sizes):
        first = operator.make(*chosen)
        size = max(1, sum(_bytes(each) for each in first))
        count = min(
            MOST_CALLS, max(3, ceil(POOL_BYTES / size)), max(2, int(ROUND_SECONDS / _once(operator.call, first)))
        )
        given = [first, *(operator.make(*chosen) for _ in range(count - 1))]
        ready()
        seconds.append(operator.share * _seconds_of_call(operator.call, given))
    return SecondsTable(sizes=tuple(tuple(map(float, steps)) for steps in operator.sizes), seconds=tuple(seconds))


def _seconds_of_call(call: Callable[..., Any], given: list[Inputs]) -> float:
    """The median of some rounds over all inputs; results stay until a round is over, as activations do."""
    found, kept = list[float](), list[Any]()
    for _ in range(1 + REPEATS):
        kept.clear()
        began = time.perf_counter()
        for inputs in given:
            kept.append(call(*inputs))
        found.append((time.perf_counter() - began) / len(given))
    return median(found[1:])


def _once(call: Callable[..., Any], inputs: Inputs) -> float:
    call(*inputs)
    began = time.perf_counter()
    call(*inputs)
    return max(1e-7, time.perf_counter() - began)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _flat(count: int) -> Callable[[int], Inputs]:
    return lambda elements: tuple(torch.rand(elements) for _ in range(count))


def _rows(count: int) -> Callable[[int], Inputs]:
    return lambda elements: tuple(torch.rand(elements // ROW, ROW) for _ in range(count))


def _factors(layouts: str) -> Callable[[int, int, int], Inputs]:
    def make(rows: int, inner: int, columns: int) -> Inputs:
        left, right = torch.rand(rows, inner), torch.rand(inner, columns)
        return (
            torch.rand(inner, rows).t() if layouts[0] == "t" else left,
            torch.rand(columns, inner).t() if layouts[1] == "t" else right,
        )

    return make


def _heads(length: int, width: int) -> Inputs:
    """As models make them: the heads of a row of tokens lie side by side."""
    return tuple(torch.rand(1, length, HEADS, width).transpose(1, 2) for _ in range(3))


def _attend(causal: bool) -> Callable[..., Tensor]:
    return lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, is_causal=causal)


def _attended(causal: bool) -> Callable[[int, int], Inputs]:
    """Inputs, results and a gradient of an attention."""

    def make(length: int, width: int) -> Inputs:
        q, k, v = _heads(length, width)
        out, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
        return q, k, v, out, sums, torch.rand_like(out)

    return make


def _attend_back(causal: bool) -> Callable[..., Any]:
    back = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return lambda q, k, v, out, sums, grad: back(grad, q, k, v, out, sums, 0.0, causal)


_RULE = AdamRule(lr=1e-4, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01, decoupled=True, bias_correction=True)


def _update(weight: Tensor, grad: Tensor, first: Tensor, second: Tensor) -> None:
    grad.mul_(0.999)  # clipping
    adam_([weight], [grad], [first], [second], 10, _RULE)


def _squared_norm(x: Tensor) -> Tensor:
    return squared_norm([(x, True)], REFERENCE)


def _norm(x: Tensor) -> Any:
    return torch.native_layer_norm(x, [ROW], x[0], x[0], 1e-5)


def _norm_back(grad: Tensor, x: Tensor) -> Any:
    edge = x[:, :1]
    return torch.ops.aten.native_layer_norm_backward(grad, x, [ROW], edge, edge, x[0], x[0], [True, True, True])


def _table(elements: int) -> Inputs:
    """A table of as many elements as are looked up."""
    return torch.rand(max(1, elements // ROW), ROW), torch.randint(max(1, elements // ROW), (max(1, elements // ROW),))


def _looked_up(elements: int) -> Inputs:
    """Gradients and a table that together have ``elements``."""
    rows = max(1, elements // ROW // 2)
    return torch.rand(rows, ROW), torch.randint(rows, (rows,))


def _embed_back(grad: Tensor, places: Tensor) -> Tensor:
    return torch.ops.aten.embedding_dense_backward(grad, places, len(grad), -1, False)  # type: ignore[no-any-return]


_ATEN = torch.ops.aten
_PASSES: Mapping[str, tuple[Callable[[int], Inputs], Callable[..., Any]]] = MappingProxyType({
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
