"""Errors about DeepSpeed modules that Trine lacks: an import of one names the nearest equivalent and its page."""

import sys
from collections.abc import Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import MappingProxyType, ModuleType
from typing import Any

_DOOR = "engine.deepspeed."
_NEAREST: Mapping[str, str] = MappingProxyType({
    "autotuning": "`trine plan --search` ranks layouts without trial runs (docs/guides/planning.md)",
    "checkpointing": "engine.deepspeed.checkpointing has checkpoint, and random numbers follow the seed of the "
                     "configuration (docs/reference/deepspeed.md)",
    "comm.": "torch.distributed has the collectives, also as engine.deepspeed.comm (docs/reference/deepspeed.md)",
    "compile": '"compile": true in the configuration compiles the blocks (docs/reference/configuration.md)',
    "compression": "the model is trained as it is; quantize_frozen holds frozen weights in 8 or 4 bits "
                   "(docs/reference/configuration.md)",
    "elasticity": "a checkpoint loads on any grid (docs/guides/checkpoints.md)",
    "inference": "eng.generate and eng.predict use the weights that are trained (docs/guides/training_loop.md)",
    "init_inference": "eng.generate and eng.predict use the weights that are trained (docs/guides/training_loop.md)",
    "launcher": "`trine launch` starts jobs (docs/guides/launching.md)",
    "module_inject": "parallel.tensor cuts any model by a plan that it finds (docs/guides/tensor.md)",
    "moe": "a model with experts is trained as it is, and parallel.expert shares them (docs/guides/experts.md)",
    "monitor": "monitor of the configuration writes the figures of each step (docs/reference/configuration.md)",
    "ops": "kernels of the configuration chooses the engine's own (docs/reference/configuration.md)",
    "pipe.": "engine.deepspeed.pipe has PipelineModule and its layers (docs/reference/deepspeed.md)",
    "profiling": "the step report has tflops and mfu, and monitor.profile records a step "
                 "(docs/reference/configuration.md)",
    "runtime.activation_checkpointing": "engine.deepspeed.checkpointing has checkpoint (docs/reference/deepspeed.md)",
    "runtime.bf16_optimizer": "eng.masters has the fp32 weights (docs/guides/training_loop.md)",
    "runtime.data_pipeline": "the data is the script's: order or cut it in the loader (docs/reference/deepspeed.md)",
    "runtime.domino": "parallel.tensor cuts any model by a plan that it finds (docs/guides/tensor.md)",
    "runtime.fp16": "fp16 of the configuration scales the loss (docs/reference/configuration.md)",
    "runtime.hybrid_engine": "eng.generate uses the weights that are trained (docs/guides/training_loop.md)",
    "runtime.sequence_parallel": "parallel.sequence_parallel shards activations over tensor ranks "
                                 "(docs/guides/tensor.md)",
    "sequence": "parallel.sequence_parallel shards activations over tensor ranks (docs/guides/tensor.md)",
    "DeepSpeedTransformerLayer": "kernels of the configuration chooses the engine's own "
                                 "(docs/reference/configuration.md)",
    "InferenceEngine": "eng.generate and eng.predict use the weights that are trained (docs/guides/training_loop.md)",
    "OnDevice": 'build the model under torch.device("meta") (docs/reference/deepspeed.md)',
    "checkpoint": "load_checkpoint reads DeepSpeed's folders, and every checkpoint loads on any grid "
                  "(docs/guides/checkpoints.md)",
})  # fmt: skip
"""Beginning of a module name of DeepSpeed -> the nearest feature here; the longest beginning decides."""


class MissingModules(MetaPathFinder):
    """Import finder that raises an error with advice for DeepSpeed modules that ``engine.deepspeed`` lacks."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Raises for a missing module inside ``engine.deepspeed``; returns None for modules outside it.

        Raises:
            ModuleNotFoundError: the module is inside ``engine.deepspeed``; the message names the nearest equivalent.
        """
        if not fullname.startswith(_DOOR):
            return None
        # without a name: `from package import name` swallows an error about that name
        raise ModuleNotFoundError(missing_sentence(fullname.removeprefix(_DOOR)))


def missing_sentence(name: str) -> str:
    """Returns the error text for a DeepSpeed name that ``engine.deepspeed`` lacks, with the nearest equivalent.

    ``name`` is the path below ``deepspeed``, such as "runtime.domino".
    """
    found = [about for about in _NEAREST if name == about or f"{name}.".startswith(f"{about.removesuffix('.')}.")]
    nearest = _NEAREST[max(found, key=len)] if found else "docs/reference/deepspeed.md lists the names that are there"
    return f"deepspeed.{name} is not among the names of engine.deepspeed: {nearest}."


def install() -> None:
    """Appends a ``MissingModules`` finder to ``sys.meta_path``, unless there is one."""
    if not any(isinstance(each, MissingModules) for each in sys.meta_path):
        sys.meta_path.append(MissingModules())


def missing_attribute(engine: object, model: Any, name: str) -> AttributeError:
    """Returns the error for the attribute ``name``, which neither the engine object nor its model has."""
    return AttributeError(
        f"{type(engine).__name__!r} object of engine.deepspeed has no attribute {name!r}, and the model "
        f"({type(model).__name__}) has none either; docs/reference/deepspeed.md lists the engine's members."
    )
