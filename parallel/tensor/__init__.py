"""Tensor parallelism: layers whose weights are cut over the axis "tp" (Megatron-LM, Shoeybi et al. 2019).

A plan (``cuts``) says which layer is cut how: found for any model (``auto``), or written in words (``styles``).
``install`` carries it out on a user's model in place. The sharded layers may also be written into a model directly:

    axis = TensorAxis(comm)
    region = Region(axis)                                  # what a block's column layers share until its row layer
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
    """Import a public name when it is first asked for: modules of this package must not wait for all of it."""
    homes = {
        "TensorAxis": "tp_axis", "GatheredColumnLinear": "layers.linear", "ColumnLinear": "layers.linear",
        "RowLinear": "layers.linear", "Region": "layers.parallel_region",
        "VocabularyEmbedding": "layers.vocab_parallel", "VocabularyHead": "layers.vocab_parallel",
        "gather_logits": "logits.sharded_logits",
    }  # fmt: skip
    if name not in homes:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{homes[name]}"), name)
