"""The Trainer of Hugging Face over the engine: ``from engine.huggingface import Trainer``.

training      Trainer, and the parts of it that subclasses of transformers' Trainer take
arguments     TrainingArguments and the engine's configuration: which value has which owner
whole_steps   loss and microbatches of a step that runs as one, for pipelines

Tested inside transformers 5.23 with accelerate 1.15.
"""

from typing import TYPE_CHECKING, Any

from engine.hosts.versions import refuse_untested

if TYPE_CHECKING:
    from engine.huggingface.training import Trainer

__all__ = ["Trainer"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'engine.huggingface' has no attribute {name!r}")
    refuse_untested("transformers", "accelerate")
    from engine.huggingface.training import Trainer

    return Trainer
