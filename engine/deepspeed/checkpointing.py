"""``deepspeed.checkpointing``: recomputed activations by a call in the model."""

from collections.abc import Callable
from typing import Any

from torch.utils import checkpoint as torch_checkpoint


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """``function(*args)``, whose activations the backward recomputes with the random numbers of the forward."""
    return torch_checkpoint.checkpoint(function, *args, use_reentrant=False)


def configure(*_: Any, **__: Any) -> None:
    """Nothing: DeepSpeed's options say where activations are kept, and change no value."""


def is_configured() -> bool:
    """Whether ``checkpoint`` may be called, which it always may."""
    return True


def reset() -> None:
    """Nothing: nothing is kept between calls."""
