"""``engine.initialize``: from a module and a JSON file to an engine."""

import logging
import os
from collections.abc import Mapping
from typing import Any

from torch import nn

from engine.banner import describe
from engine.build import ModelSource, Request, build, make_model, prepare
from engine.config import Config, load_config
from engine.engine import Engine
from engine.loss import LossFunction
from engine.lr import SchedulerArgument
from engine.parallel.comm import open_world, read_world
from engine.zero.optimizer import OptimizerFactory

logger = logging.getLogger("trine")


def initialize(
    model: nn.Module | ModelSource,
    config: Mapping[str, Any] | str | os.PathLike[str] | Config,
    loss_fn: LossFunction | None = None,
    example_batch: Any = None,
    optimizer: OptimizerFactory | None = None,
    lr_scheduler: SchedulerArgument | None = None,
) -> Engine:
    """Put ``model`` on the grid that ``config`` describes.

    Under torchrun the process group is started (NCCL on GPUs, gloo otherwise) unless it runs already;
    without torchrun this is a run of one process.

    Args:
        model: a module, or a callable that builds one; every rank passes the same weights.
        config: a dict, the path of a JSON file, or a :class:`Config`.
        loss_fn: ``(output, batch) -> loss`` with a 0-dim mean or (sum, weight); without it the loss is
            looked for in the model's output.
        example_batch: one microbatch, or its shapes; data parallelism does not need it.
        optimizer: ``params -> torch.optim.Optimizer``, in place of the configured one.
        lr_scheduler: ``update -> factor`` or ``optimizer -> LRScheduler``.

    Raises:
        ConfigError, GridError, PlanError: one sentence a problem, before any communication, except for
            ranks that were given different models or configurations.
    """
    world = read_world()
    resolved = load_config(config, world.size)
    built = make_model(model, resolved.seed, world.device)
    request = Request(loss_fn, optimizer, lr_scheduler)
    plan = prepare(built, resolved, request)
    open_world(world)
    engine = Engine(build(built, plan, world, request))
    if world.rank == 0:
        logger.info(describe(engine.plan, str(world.device)))
    return engine
