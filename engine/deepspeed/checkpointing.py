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
    """Returns ``function(*args)``; backward recomputes its activations with the random numbers of the forward."""
    return torch_checkpoint.checkpoint(function, *args, use_reentrant=False)


def configure(*_: Any, **__: Any) -> None:
    """Does nothing, because DeepSpeed's options only choose where activations are stored."""


def is_configured() -> bool:
    """Returns True, because ``checkpoint`` needs no configuration."""
    return True


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seeds the device. During training, tensor ranks draw different random numbers for sharded tensors in any case."""
    get_accelerator().manual_seed(seed)


def reset() -> None:
    """Does nothing, because recomputation has no state between calls."""
