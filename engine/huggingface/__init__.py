"""Hugging Face's loops over the engine: ``from engine.huggingface import Trainer``, or ``Accelerator``.

trainer        Trainer: transformers' loop over the engine's model and checkpoints
trl_loop       overrides that TRL's trainers need in addition
own_loop       Accelerator: a user's own loop, written for accelerate
accelerator    methods of accelerate that both loops call: data ranks, backward, step
whole_steps    steps of a Trainer on a pipeline, which run as one ``train_batch``

Imported on demand; ``import engine`` imports neither this package nor the libraries.
"""

from typing import TYPE_CHECKING, Any

from engine.hosting import check_versions

if TYPE_CHECKING:
    from engine.huggingface.own_loop import Accelerator
    from engine.huggingface.trainer import Trainer

__all__ = ["Accelerator", "Trainer"]


def __getattr__(name: str) -> Any:
    if name == "Accelerator":
        check_versions("accelerate")
        from engine.huggingface.own_loop import Accelerator

        return Accelerator
    if name == "Trainer":
        check_versions("transformers", "accelerate")
        from engine.huggingface.trainer import Trainer

        return Trainer
    raise AttributeError(f"module 'engine.huggingface' has no attribute {name!r}")
