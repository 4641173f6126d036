"""``deepspeed.checkpointing``: recomputed activations by a call in the model."""

from collections.abc import Callable
from typing import Any

from torch.utils import checkpoint as torch_checkpoint

from engine.deepspeed.accelerator import get_accelerator
from engine.deepspeed.missing import missing_sentence


def __getattr__(name: str) -> Any:
    """Refuse what is not here.

    Raises:
        AttributeError: the sentence, which names the nearest thing.
    """
    raise AttributeError(name if name.startswith("_") else missing_sentence(f"checkpointing.{name}"))


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """``function(*args)``, whose activations the backward recomputes with the random numbers of the forward."""
    return torch_checkpoint.checkpoint(function, *args, use_reentrant=False)


def configure(*_: Any, **__: Any) -> None:
    """Nothing: DeepSpeed's options say where activations are kept, and change no value."""


def is_configured() -> bool:
    """Whether ``checkpoint`` may be called, which it always may."""
    return True


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed the device; in training the engine gives each tensor rank random numbers of its own where a shard draws."""
    get_accelerator().manual_seed(seed)


def reset() -> None:
    """Nothing: nothing is kept between calls."""
