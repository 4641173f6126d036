"""Dropout on the way into an adapter, on a random stream that suits its input (PEFT's ``lora_dropout``).

    beside a column layer    the input is full: all ranks draw one mask, though the region is open
    beside a row layer       the input is a shard: each rank draws a mask of its own, though the region is closed

Otherwise the first product of the adapter, which every rank holds whole, would get other gradients on each rank.
"""

from contextlib import nullcontext
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from engine.parallel.model.forward_patch import ForwardPatches, PatchLayer
from engine.parallel.tensor.layers.parallel_region import Region

BASE = ".base_layer"
"""The name that PEFT gives the layer inside its own."""


class AdapterDropout(nn.Module):
    """A dropout that draws alike on all tensor ranks, or apart."""

    tensor_region: Region
    tensor_stream: int | None
    """The number of its stream, which all ranks draw from; None: each rank has a stream of its own."""

    def forward(self, x: Tensor) -> Tensor:
        """Runs the module's own forward."""
        stream = self.tensor_region.drawing(x.device, self.tensor_stream) if self.training else nullcontext()
        with stream:
            dropped: Tensor = super().forward(x)
            return dropped


def place_dropouts(parent: nn.Module, region: Region, stream: int | None, patches: ForwardPatches) -> None:
    """Gives the dropouts of the adapters in ``parent``, PEFT's layer around a sharded one, their streams."""
    dropouts: Any = getattr(parent, "lora_dropout", None)
    for module in dropouts.values() if isinstance(dropouts, nn.ModuleDict) else ():
        if isinstance(module, _DropoutNd) and module.p > 0:
            note = f"draws {'alike on all tensor ranks' if stream is not None else 'apart on each tensor rank'}"
            with patches.changing(module, PatchLayer.TENSOR, note):
                own = type(module)
                module.__class__ = type(f"Adapter{own.__name__}", (AdapterDropout, own), {})
                module.tensor_region, module.tensor_stream = region, stream  # type: ignore[assignment]
