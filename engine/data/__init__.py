"""Batches of a data rank, at an exact position in the data: from text, token files, and datasets of other libraries.

Sampler, Batches, window_count, evaluation_batches     windows: windows of a text, in a resumable order
IndexedTokens, NpyTokens                               windows: memory-mapped token files
loader, Packing, Padding                               step_loader, settings: any dataset, rows of whole steps

Names are imported on first use, so that samplers do not import torch.
"""

from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.data.settings import Packing, Padding
    from engine.data.step_loader import StepLoader, loader
    from engine.data.windows import Batches, IndexedTokens, NpyTokens, Sampler, evaluation_batches, window_count

__all__ = [
    "Batches",
    "IndexedTokens",
    "NpyTokens",
    "Packing",
    "Padding",
    "Sampler",
    "StepLoader",
    "evaluation_batches",
    "loader",
    "window_count",
]

_HOMES = MappingProxyType(
    {
        "Packing": "settings",
        "Padding": "settings",
        "StepLoader": "step_loader",
        "loader": "step_loader",
    }
)


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'engine.data' has no attribute {name!r}")
    return getattr(import_module(f"engine.data.{_HOMES.get(name, 'windows')}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
