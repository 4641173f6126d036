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
    from engine.parallel.tensor.axis import TensorAxis
    from engine.parallel.tensor.gathered import GatheredColumnLinear
    from engine.parallel.tensor.layers import ColumnLinear, RowLinear
    from engine.parallel.tensor.region import Region
    from engine.parallel.tensor.vocabulary import VocabularyEmbedding, VocabularyHead

__all__ = [
    "ColumnLinear",
    "GatheredColumnLinear",
    "Region",
    "RowLinear",
    "TensorAxis",
    "VocabularyEmbedding",
    "VocabularyHead",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for: modules of this package must not wait for all of it."""
    homes = {
        "TensorAxis": "axis", "GatheredColumnLinear": "gathered", "ColumnLinear": "layers", "RowLinear": "layers",
        "Region": "region", "VocabularyEmbedding": "vocabulary", "VocabularyHead": "vocabulary",
    }  # fmt: skip
    if name not in homes:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{homes[name]}"), name)
