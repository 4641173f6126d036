"""DeepSpeed's names over Trine's engine: ``import engine.deepspeed as deepspeed`` in an existing script.

initialize                     setup: arguments of DeepSpeed's initialize -> engine.initialize, and its 4-tuple
DeepSpeedEngine                deepspeed_engine: members of its engine object
zero, utils, pipe, comm        Init, GatheredParameters, safe_get_*, PipelineModule, ...
accelerator, ops, runtime      get_accelerator, names of optimizers, lr_schedules, DeepSpeedConfig, ...
missing                        imports of absent modules, which fail with the nearest equivalent

The package adds names only; the public parts of ``engine`` do the work.
"""

from typing import Any

from engine.deepspeed import accelerator, checkpointing, comm, ops, pipe, runtime, utils, zero
from engine.deepspeed.accelerator import get_accelerator
from engine.deepspeed.comm import init_distributed
from engine.deepspeed.deepspeed_engine import DeepSpeedEngine
from engine.deepspeed.integrations import HfDeepSpeedConfig
from engine.deepspeed.missing import install, missing_sentence
from engine.deepspeed.pipe import PipelineModule
from engine.deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError
from engine.deepspeed.setup import add_config_arguments, initialize, tp_model_init
from engine.deepspeed.utils.logging import log_dist

__all__ = [
    "DeepSpeedConfig",
    "DeepSpeedConfigError",
    "DeepSpeedEngine",
    "HfDeepSpeedConfig",
    "PipelineModule",
    "accelerator",
    "add_config_arguments",
    "checkpointing",
    "comm",
    "get_accelerator",
    "init_distributed",
    "initialize",
    "log_dist",
    "ops",
    "pipe",
    "runtime",
    "tp_model_init",
    "utils",
    "zero",
]
__version__ = "0.19.8"
"""DeepSpeed version of these names and numbers, for scripts that require a minimum version."""
__version_major__, __version_minor__, __version_patch__ = 0, 19, 8
install()


def __getattr__(name: str) -> Any:
    """Raises for an absent name.

    Raises:
        AttributeError: always; the message names the nearest equivalent.
    """
    raise AttributeError(name if name.startswith("_") else missing_sentence(name))
