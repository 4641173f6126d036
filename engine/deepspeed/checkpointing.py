"""``deepspeed.checkpointing``: activation recomputation that the model calls itself."""

from collections.abc import Callable
from typing import Any

from torch.utils import checkpoint as torch_checkpoint

from engine.deepspeed.accelerator import get_accelerator
from engine.deepspeed.missing import missing_sentence


def __getattr__(name: str) -> Any:
    """Raises for an absent name.

    Raises:
        AttributeError: always; the message names the nearest equivalent.
    """
    raise AttributeError(name if name.startswith("_") else missing_sentence(f"checkpointing.{name}"))


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """Returns ``function(*args)``, without storing intermediate activations.

    The backward recomputes the activations with the same random numbers.
    """
    return torch_checkpoint.checkpoint(function, *args, use_reentrant=False)


def configure(*_: Any, **__: Any) -> None:
    """Does nothing, because ``checkpoint`` needs no configuration."""


def is_configured() -> bool:
    """Returns True, because ``checkpoint`` needs no configuration."""
    return True


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seeds the random generator of the current device with ``seed``, without an offset for the tensor rank."""
    get_accelerator().manual_seed(seed)


def reset() -> None:
    """Does nothing, because recomputation has no state between calls."""
