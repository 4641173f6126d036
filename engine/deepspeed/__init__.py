"""DeepSpeed's names over Trine's engine: ``import engine.deepspeed as deepspeed`` in a script that exists.

initialize                     setup: arguments of DeepSpeed's initialize -> engine.initialize, and its 4-tuple
DeepSpeedEngine                deepspeed_engine: members of its engine object
zero, utils, pipe, comm        Init, GatheredParameters, safe_get_*, PipelineModule, ...
runtime                        lr_schedules, pipe.topology

Names only: everything is done by the public parts of ``engine``.
"""

from engine.deepspeed import checkpointing, comm, pipe, runtime, utils, zero
from engine.deepspeed.comm import init_distributed
from engine.deepspeed.deepspeed_engine import DeepSpeedEngine
from engine.deepspeed.pipe import PipelineModule
from engine.deepspeed.setup import add_config_arguments, initialize

__all__ = [
    "DeepSpeedEngine",
    "PipelineModule",
    "add_config_arguments",
    "checkpointing",
    "comm",
    "init_distributed",
    "initialize",
    "pipe",
    "runtime",
    "utils",
    "zero",
]
