"""Dropout in front of an adapter (PEFT's ``lora_dropout``), on a random stream that suits the adapter's input.

    of a column layer    the input is full: all ranks draw one mask, though the region is open
    of a row layer       the input is a shard: each rank draws a mask of its own, though the region is closed

Otherwise the adapter's first matrix, which is replicated on all ranks, would get a different gradient on each rank.
"""

from contextlib import nullcontext
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from engine.parallel.model.forward_patch import ForwardPatches, PatchLayer
from engine.parallel.tensor.layers.parallel_region import Region

BASE = ".base_layer"
"""Attribute path of the wrapped layer in PEFT's layers."""


class AdapterDropout(nn.Module):
    """Dropout of an adapter that draws one mask for all tensor ranks, or a different mask on each."""

    tensor_region: Region
    tensor_stream: int | None
    """Number of the random stream shared by all tensor ranks; None: a different stream on each rank."""

    def forward(self, x: Tensor) -> Tensor:
        """Runs the dropout of the original class on the chosen random stream."""
        stream = self.tensor_region.drawing(x.device, self.tensor_stream) if self.training else nullcontext()
        with stream:
            dropped: Tensor = super().forward(x)
            return dropped


def place_dropouts(parent: nn.Module, region: Region, stream: int | None, patches: ForwardPatches) -> None:
    """Sets the random stream of each ``lora_dropout`` in ``parent``, the PEFT layer around a sharded layer."""
    dropouts: Any = getattr(parent, "lora_dropout", None)
    for module in dropouts.values() if isinstance(dropouts, nn.ModuleDict) else ():
        if isinstance(module, _DropoutNd) and module.p > 0:
            note = f"draws {'one mask for all tensor ranks' if stream is not None else 'a mask for each tensor rank'}"
            with patches.changing(module, PatchLayer.TENSOR, note):
                own = type(module)
                module.__class__ = type(f"Adapter{own.__name__}", (AdapterDropout, own), {})
                module.tensor_region, module.tensor_stream = region, stream  # type: ignore[assignment]
