"""Kernels that communicate, on eight ranks: rows of two sequences, as a layer's forward and backward send them."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from engine.kernels.gpu.grouped_matmul import launch_grouped_product, launch_grouped_weight_gradient
from engine.kernels.gpu.overlap.expert_matmul import (
    launch_collect_rows,
    launch_dispatch_product,
    launch_product_return,
)
from engine.kernels.gpu.overlap.launches import (
    KernelCall,
    launch_collect_slots,
    launch_forward_slots,
    launch_gather_product,
    launch_multicast_sum,
    launch_product_scatter,
    launch_sum_slots,
)
from engine.kernels.overlap import ExpertRows, Mailbox
from tests.kernels.local_launches import BF16, FP32, Launch, meta

RANKS, SEQUENCES, ROWS, DEPTH, COLUMNS = 8, 2, 512, 4096, 1024


def communicating_launches() -> Iterator[tuple[str, Launch]]:
    for dtype, name in ((BF16, "bf16"), (FP32, "fp32")):
        for half in ("both", "multiply"):
            yield f"column {half} {name}", partial(_gather, dtype, half)
        for plus in (False, True):
            yield f"row{' plus' * plus} {name}", partial(_scatter, dtype, plus, False)
        yield f"everywhere {name}", partial(_scatter, dtype, False, True)
        yield f"stays {name}", partial(_scatter, dtype, False, False, True)
        part = meta(ROWS, COLUMNS, dtype=dtype)
        yield f"send on {name}", partial(launch_forward_slots, part, KernelCall(mailbox(), 17))
        yield f"collect {name}", partial(launch_collect_slots, part, KernelCall(mailbox(), 17))
        yield f"sum {name}", partial(launch_sum_slots, SEQUENCES, ROWS, COLUMNS, KernelCall(mailbox(), 17), dtype)


def switched(arch: int) -> Iterator[tuple[str, Launch]]:
    """Sums by a switch, which GPUs before Hopper have no instructions for."""
    for dtype, name in ((BF16, "bf16"), (torch.float16, "fp16"), (FP32, "fp32")) if arch >= 90 else ():
        yield f"by switch {name}", partial(launch_multicast_sum, ROWS, COLUMNS, KernelCall(mailbox(), 17), dtype)


def mailbox() -> Mailbox:
    slots, arrivals = meta(RANKS, dtype=torch.int64), meta(RANKS + 1, dtype=torch.int64)
    return Mailbox(
        rank=3, slots=slots, arrivals=arrivals, status=meta(1, dtype=torch.int64), capacity=1 << 24, most=1 << 14,
        patience=1_000_000, multicast=1 << 40,
    )  # fmt: skip


def _matrix(dtype: torch.dtype) -> Tensor:
    return meta(COLUMNS, DEPTH, dtype=dtype).t()


def _gather(dtype: torch.dtype, half: str) -> None:
    part, bias = meta(SEQUENCES, ROWS, DEPTH, dtype=dtype), meta(COLUMNS, dtype=dtype)
    launch_gather_product(part, _matrix(dtype), bias, KernelCall(mailbox(), 17), half)  # type: ignore[arg-type]


def _scatter(dtype: torch.dtype, plus: bool, everywhere: bool, stays: bool = False) -> None:
    ranks = () if everywhere else (RANKS,)
    whole = meta(SEQUENCES, *ranks, ROWS, DEPTH, dtype=dtype)
    added = meta(SEQUENCES, *ranks, ROWS, COLUMNS, dtype=dtype) if plus else None
    launch_product_scatter(whole, _matrix(dtype), added, KernelCall(mailbox(), 17), dtype, stays)


EXPERTS, INPUTS, OUTPUTS, EXPERT_ROWS = 8, 2048, 1536, 100
"""Of a rank; rows are those for each expert of each rank."""


def expert_launches() -> Iterator[tuple[str, Launch]]:
    rows = ExpertRows(counts=torch.full((RANKS, RANKS * EXPERTS), EXPERT_ROWS), rank=3)
    for dtype, name in ((BF16, "bf16"), (FP32, "fp32")):
        for transposed in (False, True):
            how = " transposed" * transposed
            yield f"experts{how} {name}", partial(_product, dtype, transposed)
            yield f"dispatch both{how} {name}", partial(_dispatch, rows, dtype, transposed)
            yield f"return{how} {name}", partial(_return, rows, dtype, transposed)
        yield f"experts {name}", partial(_gradient, dtype)
        yield f"collect rows {name}", partial(launch_collect_rows, OUTPUTS, rows, KernelCall(mailbox(), 17), dtype)


def _matrices(dtype: torch.dtype, transposed: bool) -> Tensor:
    if transposed:
        return meta(EXPERTS, OUTPUTS, INPUTS, dtype=dtype).transpose(1, 2)
    return meta(EXPERTS, INPUTS, OUTPUTS, dtype=dtype)


def _ends() -> Tensor:
    return meta(EXPERTS, dtype=torch.int32)


def _product(dtype: torch.dtype, transposed: bool) -> None:
    launch_grouped_product(meta(4096, INPUTS, dtype=dtype), _matrices(dtype, transposed), _ends())


def _gradient(dtype: torch.dtype) -> None:
    launch_grouped_weight_gradient(meta(4096, INPUTS, dtype=dtype), meta(4096, OUTPUTS, dtype=dtype), _ends())


def _dispatch(rows: ExpertRows, dtype: torch.dtype, transposed: bool) -> None:
    tokens = meta(rows.own, INPUTS, dtype=dtype)
    launch_dispatch_product(tokens, _matrices(dtype, transposed), rows, KernelCall(mailbox(), 17))


def _return(rows: ExpertRows, dtype: torch.dtype, transposed: bool) -> None:
    whole = meta(rows.here, INPUTS, dtype=dtype)
    launch_product_return(whole, _matrices(dtype, transposed), rows, KernelCall(mailbox(), 17))
