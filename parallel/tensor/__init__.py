"""Tensor parallelism: layers with weights sharded over the axis "tp" (Megatron-LM, Shoeybi et al. 2019).


    plan/             the sharding of each layer: the language of styles, their rules, and the plan as data
    auto/             finds a plan for any model and proves it on one block
    layers/           the sharded layers, and ``apply_plan``, which puts them on a user's model in place
    overlap/          collectives that run while a matrix product is computed
    logits/           vocabulary-parallel logits and losses, and logits that are computed lazily
    global_tensor/    tensors with the full shape that store this rank's shard, comparable to DTensor

    tp_axis           the axis that layers communicate over; ``thread_ranks`` simulates it with threads of one process
    collectives       Megatron's f and g and their variants, as autograd functions
    deferred_linear   a matrix product whose weight gradient may be deferred
    layers.planned_traffic    the bytes that each rank sends under a plan, counted on shapes

Model writers may also use the sharded layers directly:

    axis = TensorAxis(comm)
    region = Region(axis)                                  # shared by a block's column layers and its row layer
    up, down = ColumnLinear(d, 4 * d, axis=axis, region=region), RowLinear(4 * d, d, axis=axis, region=region)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.parallel.tensor.layers.linear import ColumnLinear, GatheredColumnLinear, RowLinear
    from engine.parallel.tensor.layers.parallel_region import Region
    from engine.parallel.tensor.layers.vocab_parallel import VocabularyEmbedding, VocabularyHead
    from engine.parallel.tensor.logits.sharded_logits import gather_logits
    from engine.parallel.tensor.tp_axis import TensorAxis

__all__ = [
    "ColumnLinear",
    "GatheredColumnLinear",
    "Region",
    "RowLinear",
    "TensorAxis",
    "VocabularyEmbedding",
    "VocabularyHead",
    "gather_logits",
]


def __getattr__(name: str) -> Any:
    """Imports a public name at its first use, so that one module of this package loads without the others."""
    homes = {
        "TensorAxis": "tp_axis", "GatheredColumnLinear": "layers.linear", "ColumnLinear": "layers.linear",
        "RowLinear": "layers.linear", "Region": "layers.parallel_region",
        "VocabularyEmbedding": "layers.vocab_parallel", "VocabularyHead": "layers.vocab_parallel",
        "gather_logits": "logits.sharded_logits",
    }  # fmt: skip
    if name not in homes:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{homes[name]}"), name)
