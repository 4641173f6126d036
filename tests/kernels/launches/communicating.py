"""Kernels that communicate, on eight ranks: rows of two sequences, as a layer's forward and backward send them."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from engine.kernels.gpu.overlap.launches import (
    KernelCall,
    launch_collect_slots,
    launch_forward_slots,
    launch_gather_product,
    launch_multicast_sum,
    launch_product_scatter,
    launch_sum_slots,
)
from engine.kernels.mailbox import Mailbox
from tests.kernels.launches.shapes import BF16, FP32, Launch, meta

RANKS, SEQUENCES, ROWS, DEPTH, COLUMNS = 8, 2, 512, 4096, 1024


def launches() -> Iterator[tuple[str, Launch]]:
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
