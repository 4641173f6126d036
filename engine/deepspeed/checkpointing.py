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
    """Runs ``function(*args)`` and returns its output, without storing the intermediate activations of ``function``.

    The backward runs ``function`` again, with the same random numbers as the forward, to recompute the activations.
    """
    return torch_checkpoint.checkpoint(function, *args, use_reentrant=False)


def configure(*_: Any, **__: Any) -> None:
    """Ignores all arguments: DeepSpeed's options choose only the memory in which activations are stored."""


def is_configured() -> bool:
    """Returns True, because ``checkpoint`` needs no configuration."""
    return True


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seeds the random generator of the current device with ``seed``.

    All tensor ranks may pass the same seed: in training they still draw different random numbers for sharded tensors.
    """
    get_accelerator().manual_seed(seed)


def reset() -> None:
    """Does nothing, because recomputation has no state between calls."""
