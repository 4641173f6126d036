"""The Trainer of Hugging Face over the engine: ``from engine.huggingface import Trainer``.

trainer        Trainer: the host's loop, data, logs, callbacks, optimizer and schedule; the engine's model and files
arguments      TrainingArguments and the engine's configuration: which value has which owner
accelerator    the Accelerator that the host's loop calls: data ranks, backward, step
hosted_model   the module that the host's loop calls
whole_steps    loss and microbatches of a step that runs as one, for pipelines
versions       the versions of the libraries in which it is tested

Imported when a script imports it; ``import engine`` imports neither it nor the libraries.
"""

from typing import TYPE_CHECKING, Any

from engine.huggingface.versions import refuse_untested

if TYPE_CHECKING:
    from engine.huggingface.trainer import Trainer

__all__ = ["Trainer"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'engine.huggingface' has no attribute {name!r}")
    refuse_untested("transformers", "accelerate")
    from engine.huggingface.trainer import Trainer

    return Trainer
