"""PEFT's layers around sharded layers: their products and their dropouts.

A layer of low-rank pairs communicates in place of the layer inside, whose input and sum serve the pairs as well.
Dropout in front of an adapter (PEFT's ``lora_dropout``) uses a random stream that suits the adapter's input:

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
from engine.parallel.tensor.layers.position_layer import PositionLayer
from engine.parallel.tensor.tp_axis import TensorAxis


class JoinedLayer(nn.Module):
    """PEFT layer that computes its low-rank adapters between the input and output collectives of a sharded layer.

    Input and output have the shapes of the wrapped layer. The adapters need no collective of their own.
    """

    base_layer: Any

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Runs the PEFT layer's forward on this rank's shards, between the collectives of the wrapped layer."""
        base = self.base_layer
        left: Tensor = base.tensor_leave(super().forward(base.tensor_enter(x), *args, **kwargs))
        return left


def join_adapter(around: nn.Module, layer: nn.Module, axis: TensorAxis, patches: ForwardPatches) -> None:
    """Makes the PEFT layer ``around`` run the collectives of ``layer``, the sharded layer that it wraps.

    Removal of ``patches`` undoes this.
    """
    with patches.changing(layer, PatchLayer.TENSOR, "leaves its collectives to the PEFT layer around it"):
        layer.tensor_joined = True  # type: ignore[assignment]
    with patches.changing(around, PatchLayer.TENSOR, "computes its pairs between the collectives of its layer"):
        own = type(around)
        bases = (PositionLayer, JoinedLayer, own) if axis.nested else (JoinedLayer, own)
        around.__class__ = type(f"Joined{own.__name__}", bases, {})


class AdapterDropout(nn.Module):
    """Mixin for an adapter's dropout in a tensor-parallel layer.

    ``tensor_stream`` selects equal or different masks on the ranks.
    """

    tensor_region: Region
    tensor_stream: int | None
    """Number of the random stream shared by all tensor ranks; None: a different stream on each rank."""

    def forward(self, x: Tensor) -> Tensor:
        """Runs the original dropout on ``x``, with the random stream ``tensor_stream``."""
        stream = self.tensor_region.drawing(x.device, self.tensor_stream) if self.training else nullcontext()
        with stream:
            dropped: Tensor = super().forward(x)
            return dropped


def place_dropouts(parent: nn.Module, layer: nn.Module, stream: int | None, patches: ForwardPatches) -> None:
    """Sets the random stream of each ``lora_dropout`` in ``parent``, the PEFT layer around the sharded ``layer``.

    ``stream``: number of a random stream that is equal on all tensor ranks; None: a different stream on each rank.
    Removal of ``patches`` undoes this.
    """
    dropouts: Any = getattr(parent, "lora_dropout", None)
    for module in dropouts.values() if isinstance(dropouts, nn.ModuleDict) else ():
        if isinstance(module, _DropoutNd) and module.p > 0:
            note = f"draws {'one mask for all tensor ranks' if stream is not None else 'a mask for each tensor rank'}"
            with patches.changing(module, PatchLayer.TENSOR, note):
                own = type(module)
                module.__class__ = type(f"Adapter{own.__name__}", (AdapterDropout, own), {})
                module.tensor_region, module.tensor_stream = layer.tensor_region, stream  # type: ignore[assignment]
