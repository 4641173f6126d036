"""Hugging Face's loops over the engine: ``from engine.huggingface import Trainer``, or ``Accelerator``.

trainer        Trainer: the host's loop, data, logs, callbacks, optimizer and schedule; the engine's model and files
trl_loop       what trainers of TRL ask of the Trainer in front of them
trl_settings   settings of TRL's trainers, and what is refused of them
arguments      TrainingArguments and the engine's configuration: which value has which owner
own_loop       Accelerator: a loop of the user's own, written for accelerate
loop_settings  a loop of the user's own and the engine's configuration: which value has which owner
accelerator    what both loops call of accelerate: data ranks, backward, step
hosted_model   the module that the host's loop calls
whole_steps    loss and microbatches of a step that runs as one, for pipelines
versions       the versions of the libraries in which it is tested

Imported when a script imports it; ``import engine`` imports neither it nor the libraries.
"""

from typing import TYPE_CHECKING, Any

from engine.huggingface.versions import refuse_untested

if TYPE_CHECKING:
    from engine.huggingface.own_loop import Accelerator
    from engine.huggingface.trainer import Trainer

__all__ = ["Accelerator", "Trainer"]


def __getattr__(name: str) -> Any:
    if name == "Accelerator":
        refuse_untested("accelerate")
        from engine.huggingface.own_loop import Accelerator

        return Accelerator
    if name == "Trainer":
        refuse_untested("transformers", "accelerate")
        from engine.huggingface.trainer import Trainer

        return Trainer
    raise AttributeError(f"module 'engine.huggingface' has no attribute {name!r}")
