"""Accelerate's ``Accelerator`` over the engine: ``from engine.accelerate import Accelerator``.

accelerator       prepare, backward, clip_grad_norm_, gather, save_state of a script that Accelerate's pages describe
stepping          the optimizer and the scheduler that ``prepare`` returns

Tested inside accelerate 1.15.
"""

from typing import TYPE_CHECKING, Any

from engine.hosts.versions import refuse_untested

if TYPE_CHECKING:
    from engine.accelerate.accelerator import Accelerator

__all__ = ["Accelerator"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'engine.accelerate' has no attribute {name!r}")
    refuse_untested("accelerate")
    from engine.accelerate.accelerator import Accelerator

    return Accelerator
