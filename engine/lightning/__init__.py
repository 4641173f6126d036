"""Lightning's Trainer over the engine: ``from engine.lightning import Strategy``.

strategy         Strategy: the ranks, and a step of Lightning's automatic optimization
hosted_module    the part of a LightningModule that is on the grid

Imported when a script imports it; ``import engine`` imports neither it nor Lightning.
"""

from typing import TYPE_CHECKING, Any

from engine.huggingface.versions import refuse_untested

if TYPE_CHECKING:
    from engine.lightning.strategy import Strategy

__all__ = ["Strategy"]


def __getattr__(name: str) -> Any:
    if name != "Strategy":
        raise AttributeError(f"module 'engine.lightning' has no attribute {name!r}")
    refuse_untested("lightning")
    from engine.lightning.strategy import Strategy

    return Strategy
