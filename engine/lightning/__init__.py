"""Lightning's Trainer over the engine: ``from engine.lightning import Strategy``.

Imported on demand; ``import engine`` imports neither this package nor Lightning.
"""

from typing import TYPE_CHECKING, Any

from engine.hosting import check_versions

if TYPE_CHECKING:
    from engine.lightning.strategy import Strategy

__all__ = ["Strategy"]


def __getattr__(name: str) -> Any:
    if name != "Strategy":
        raise AttributeError(f"module 'engine.lightning' has no attribute {name!r}")
    check_versions("lightning")
    from engine.lightning.strategy import Strategy

    return Strategy
