"""Launches of the kernels that communicate. What they need of the ranks is a :class:`Mailbox`; nothing here knows how
its memory came to be shared. All ranks make the same calls, with equal shapes, and count their epochs alike.

Shape suffixes: B sequences of L rows each that a rank holds, W ranks, K the dim that is summed over, N columns.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from engine.kernels.device import is_host
from engine.kernels.gpu.launch_shapes import EXACT, GROUP, HALF, TF32, Tile, ceil_div, processors
from engine.kernels.gpu.linear import as_it_lies
from engine.kernels.gpu.overlap.gather_matmul import gather_product_kernel
from engine.kernels.gpu.overlap.matmul_scatter import (
    collect_slots_kernel,
    forward_slots_kernel,
    product_scatter_kernel,
    sum_slots_kernel,
)
from engine.kernels.gpu.overlap.multicast_sum import multicast_sum_kernel
from engine.kernels.mailbox import Mailbox

Half = Literal["push", "multiply", "both"]


@dataclass(frozen=True, slots=True)
class KernelCall:
    """One call of all ranks."""

    mailbox: Mailbox
    epoch: int
    tile: Tile | None = None
    """Of its products; None: the one that ships for their dtype."""
    programs: int | None = None
    """Of each kernel, all of which run at once; None: one on each processor. Ranks on one GPU take a share each."""

    def shape(self, dtype: torch.dtype) -> Tile:
        """The tile of a product in ``dtype``."""
        return self.tile or tile_of(dtype)

    def grid(self, device: torch.device) -> tuple[int]:
        """All programs run at once, so that those that wait never keep others from what they wait for; where kernels
        are interpreted programs run one after the other, so there is one."""
        return (1 if is_host(device) else self.programs or processors(device),)

    @property
    def numbers(self) -> tuple[int, int, int, int, int]:
        """As kernels take them."""
        box = self.mailbox
        return box.rank, self.epoch, box.patience, box.capacity, box.most


def launch_gather_product(
    part_BLK: Tensor, matrix_KN: Tensor, bias: Tensor | None, call: KernelCall, half: Half = "both"
) -> Tensor:
    """out [B, W, L, N] = rows of all ranks times ``matrix_KN`` plus ``bias``, in the dtype of the matrix.

    ``part_BLK`` is contiguous, of the dtype of the matrix. ``half``: "push" leaves the result empty, "multiply" pushes
    nothing.
    """
    matrix, transposed = as_it_lies(matrix_KN)
    (sequences, rows, depth), columns = part_BLK.shape, matrix_KN.shape[1]
    shape, mailbox = call.shape(matrix.dtype), call.mailbox
    out = matrix.new_empty((sequences, mailbox.ranks, rows, columns))
    gather_product_kernel[call.grid(out.device)](
        part_BLK, matrix, bias, out, mailbox.slots, mailbox.arrivals, mailbox.status, *call.numbers,
        sequences, rows, columns, depth,
        RANKS=mailbox.ranks, PUSHES=half != "multiply", MULTIPLIES=half != "push", MATRIX_TRANSPOSED=transposed,
        PRECISION=precision(), BIAS=bias is not None, **tile_shape(shape), GROUP=GROUP,
    )  # fmt: skip
    return out


def launch_product_scatter(
    whole: Tensor, matrix_KN: Tensor, plus: Tensor | None, call: KernelCall, dtype: torch.dtype, stays: bool = False
) -> None:
    """Multiply ``whole`` [B, W, L, K], add ``plus`` [B, W, L, N], and send each rank its rows, in ``dtype``.

    A ``whole`` of three dims, [B, L, K], goes to all ranks. With ``stays`` the rows are left in the memory of this
    rank, for :func:`launch_multicast_sum`.
    """
    everywhere = whole.dim() == 3
    matrix, transposed = as_it_lies(matrix_KN)
    sequences, (rows, depth), columns = whole.shape[0], whole.shape[-2:], matrix_KN.shape[1]
    shape, mailbox = call.shape(matrix.dtype), call.mailbox
    product_scatter_kernel[call.grid(whole.device)](
        whole, matrix, plus, whole.new_empty(0, dtype=dtype), mailbox.slots, mailbox.arrivals, mailbox.status,
        *call.numbers, sequences, rows, columns, depth,
        RANKS=mailbox.ranks, EVERYWHERE=everywhere, STAYS=stays, MATRIX_TRANSPOSED=transposed, PRECISION=precision(),
        PLUS=plus is not None, **tile_shape(shape), GROUP=GROUP,
    )  # fmt: skip


def launch_sum_slots(sequences: int, rows: int, columns: int, call: KernelCall, dtype: torch.dtype) -> Tensor:
    """out [B, L, N]: the sum of what all ranks have sent, in the tiles of the product."""
    shape, mailbox = call.shape(dtype), call.mailbox
    out = torch.empty((sequences, rows, columns), dtype=dtype, device=mailbox.status.device)
    sum_slots_kernel[call.grid(out.device)](
        out, mailbox.slots, mailbox.arrivals, mailbox.status, *call.numbers, sequences, rows, columns,
        RANKS=mailbox.ranks, BM=shape.rows, BN=shape.columns, num_warps=shape.warps,
    )  # fmt: skip
    return out


def launch_multicast_sum(rows: int, columns: int, call: KernelCall, dtype: torch.dtype) -> None:
    """Add what all ranks keep of this rank's rows [L, N], and send the sum to all of them in the next epoch."""
    shape, mailbox = call.shape(dtype), call.mailbox
    like = torch.empty(0, dtype=dtype, device=mailbox.status.device)
    multicast_sum_kernel[call.grid(like.device)](
        like, mailbox.multicast, mailbox.slots, mailbox.arrivals, mailbox.status, *call.numbers, rows, columns,
        RANKS=mailbox.ranks, INSTRUCTIONS=None if is_host(like.device) else _add_and_give(dtype),
        BYTES=dtype.itemsize, BM=shape.rows, BN=shape.columns, num_warps=shape.warps,
    )  # fmt: skip


def _add_and_give(dtype: torch.dtype) -> str:
    """PTX: 16 bytes added over all memories behind the address $1, and stored into all behind $2, if $3."""
    kind = {torch.float32: "v4.f32", torch.float16: "v4.f16x2", torch.bfloat16: "v4.bf16x2"}[dtype]
    wide = "" if dtype == torch.float32 else ".acc::f32"
    return f"""{{ .reg .pred p; .reg .b32 w<4>;
        setp.ne.s32 p, $3, 0;
        @p multimem.ld_reduce.relaxed.sys.global.add{wide}.{kind} {{w0, w1, w2, w3}}, [$1];
        @p multimem.st.relaxed.sys.global.{kind} [$2], {{w0, w1, w2, w3}};
        mov.u32 $0, $3; }}"""


def launch_forward_slots(part_LN: Tensor, call: KernelCall) -> None:
    """Send ``part_LN``, contiguous, to all ranks, for :func:`launch_collect_slots`."""
    rows, columns = part_LN.shape
    shape, mailbox = call.shape(part_LN.dtype), call.mailbox
    forward_slots_kernel[call.grid(part_LN.device)](
        part_LN, mailbox.slots, mailbox.arrivals, mailbox.rank, call.epoch, mailbox.capacity, mailbox.most,
        rows, columns,
        RANKS=mailbox.ranks, BM=shape.rows, BN=shape.columns, num_warps=shape.warps,
    )  # fmt: skip


def launch_collect_slots(part_LN: Tensor, call: KernelCall) -> Tensor:
    """out [W, L, N]: what all ranks have sent, each as much as ``part_LN``."""
    shape, mailbox = call.shape(part_LN.dtype), call.mailbox
    out = part_LN.new_empty((mailbox.ranks, *part_LN.shape))
    collect_slots_kernel[call.grid(out.device)](
        out, mailbox.slots, mailbox.arrivals, mailbox.status, *call.numbers, *part_LN.shape,
        RANKS=mailbox.ranks, BM=shape.rows, BN=shape.columns, num_warps=shape.warps,
    )  # fmt: skip
    return out


def tile_of(dtype: torch.dtype) -> Tile:
    """The tile of a product in ``dtype``."""
    if dtype.itemsize == 2:
        return HALF
    return TF32 if precision() == "tf32" else EXACT


def signals_of(sequences: int, rows: int, columns: int, tile: Tile) -> int:
    """Tiles of a product of a rank's rows, which are the most signals that it sends to another."""
    return int(sequences * ceil_div(rows, tile.rows) * ceil_div(columns, tile.columns))


def tile_shape(tile: Tile) -> dict[str, Any]:
    """The arguments of a kernel that say how large its tiles are and how many warps and stages it has."""
    return {
        "BM": tile.rows, "BN": tile.columns, "BK": tile.depth, "num_warps": tile.warps, "num_stages": tile.stages,
    }  # fmt: skip


def precision() -> str:
    """Of products of fp32 numbers, as torch is set: "tf32" or "ieee"."""
    return "tf32" if torch.get_float32_matmul_precision() != "highest" else "ieee"
