"""Products of experts: of this rank's rows, and with the journeys there and back on eight ranks."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from engine.kernels.expert_rows import ExpertRows
from engine.kernels.gpu.grouped_matmul import launch_grouped_product, launch_grouped_weight_gradient
from engine.kernels.gpu.overlap.expert_matmul import (
    launch_collect_rows,
    launch_dispatch_product,
    launch_product_return,
)
from engine.kernels.gpu.overlap.launches import KernelCall
from tests.kernels.launches.communicating import RANKS, mailbox
from tests.kernels.launches.shapes import BF16, FP32, Launch, meta

EXPERTS, INPUTS, OUTPUTS, ROWS = 8, 2048, 1536, 100
"""Of a rank; rows are those for each expert of each rank."""


def launches() -> Iterator[tuple[str, Launch]]:
    rows = ExpertRows(counts=torch.full((RANKS, RANKS * EXPERTS), ROWS), rank=3)
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
