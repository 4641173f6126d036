"""How products of tensor ranks overlap with communication: what the configuration asks for, and what is possible here.

auto      chunks on GPUs from a size on; kernels that communicate where they were measured to win on this GPU with as
          many ranks (``kernels/overlap.json``)
off       each collective is waited for
chunks    rows travel in chunks, on any device
fused     kernels that communicate; collectives where a product does not fit them
"""

import logging

import torch

from engine.config import Config
from engine.kernels.dispatch import has_triton, runs_triton
from engine.parallel.comm.comm import Comm
from engine.parallel.comm.symmetric_memory import SlotSizes, SymmetricBuffer
from engine.parallel.comm.world import timeout_seconds
from engine.parallel.tensor.tp_axis import Overlap, TensorAxis
from engine.planning.fused_layers import measured_overlap

logger = logging.getLogger("trine")
_MOST_TILES = 1 << 14
"""Of a rank's rows in one product: 16384 tiles of 128 x 128 are two million rows of 128 columns."""


def set_overlap(axis: TensorAxis, comm: Comm, config: Config, device: torch.device) -> None:
    """Tell the axis how its products overlap, and open what that takes. Every rank calls it."""
    wanted = config.parallel.overlap
    if wanted == "off":
        axis.overlap = Overlap(frozenset())
    elif wanted == "chunks":
        axis.overlap = Overlap(frozenset({device.type}), 0)
    elif axis.size > 1 and axis.wire is None:
        axis.measured = measured_overlap(config, device, axis.kernels.card)
        if wanted == "fused" or axis.measured is not None:
            runs = runs_triton(device)
            axis.symmetric = _open(comm, config) if runs else None
            if axis.symmetric is None and comm.grid.rank == 0:
                logger.warning(
                    'parallel.overlap "%s": %s; collectives take their place.', wanted, _reason(device, runs)
                )


def _open(comm: Comm, config: Config) -> SymmetricBuffer | None:
    sizes = SlotSizes(ranks=config.tp, capacity=config.parallel.overlap_buffer_bytes, most=_MOST_TILES)
    return comm.open_symmetric("tp", sizes, timeout_seconds(config.communication.timeout_seconds))


def _reason(device: torch.device, runs: bool) -> str:
    if not has_triton():
        return "Triton is not installed"
    if not runs:
        return f"Triton does not run on {device.type}"
    return "the tensor ranks share no memory that all of them can write"
