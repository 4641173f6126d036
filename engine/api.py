"""Entry point ``engine.initialize``: builds an engine from a module and a JSON file."""

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from secrets import token_hex
from typing import Any

import torch
from torch import nn

from engine.build.answered_calls import answerable
from engine.build.assemble import plan_run
from engine.build.equal_input import describe_input, difference_error
from engine.build.forward_changes import change_forwards
from engine.build.place_model import make_model, unwrap
from engine.build.request import ModelSource, Request
from engine.build.untrained import freeze_untrained
from engine.build.validate import prepare, take_model
from engine.checkpoint.coordinator import CheckpointCoordinator
from engine.checkpoint.huggingface import model_files
from engine.config import Config, load_config
from engine.engine import Engine
from engine.engine_parts import PLANNING, EngineParts, EngineResources, RankBuilder
from engine.errors import EngineError
from engine.kernels.device import is_host
from engine.optim.lr_schedules import SchedulerArgument, check_scheduler
from engine.optim.param_groups import as_trainable, read_optimizer, replacing_sections
from engine.parallel.comm.comm import Comm
from engine.parallel.comm.failed_calls import FailedCalls
from engine.parallel.comm.launcher import end_with_agent
from engine.parallel.comm.rendezvous import FailureReports, JointCalls, Rendezvous
from engine.parallel.comm.staged_backend import open_backend
from engine.parallel.comm.world import (
    World,
    meeting_point,
    open_store,
    open_world,
    prefixed,
    read_world,
    timeout_seconds,
)
from engine.planning.analysis import needs_example, needs_search
from engine.planning.profile_calls import needs_profiling
from engine.program.batch_rows import BatchRows, Name
from engine.program.forward_inputs import ForwardInputs, Inputs, with_targets
from engine.program.loss import LossFunction
from engine.program.router_replay import KEY
from engine.reporting.console import open_console, say_if_slow
from engine.reporting.failure_message import FailureMessage
from engine.watchdog.watchdog import Watchdog, open_watchdog
from engine.zero.optim.inner_optimizer import OptimizerFactory
from engine.zero.optim.matrix.own_whole import FlatWhole, OwnWholeRule, declares_whole

logger = logging.getLogger("trine")


@answerable
def initialize(
    model: nn.Module | ModelSource,
    config: Mapping[str, Any] | str | os.PathLike[str] | Config,
    loss_fn: LossFunction | None = None,
    example_batch: Any = None,
    optimizer: OptimizerFactory | torch.optim.Optimizer | None = None,
    lr_scheduler: SchedulerArgument | None = None,
    *,
    inputs: Inputs | None = None,
    whole: Name | Sequence[Name] = (),
    world: World | None = None,
) -> Engine:
    """Places ``model`` on the grid of ranks that ``config`` describes, and returns its training engine. Collective.

    Starts a process group (NCCL on GPUs, else gloo) if there is none. Freezes parameters that no optimizer updates.

    Args:
        model: a module, or a callable that builds one, equal on all ranks. DDP and torch.compile are unwrapped.
        config: a dict, the path of a JSON, TOML or YAML file, or a :class:`Config`.
        loss_fn: ``(output, batch) -> loss``: a mean or (sum, weight), and metrics; or a torch loss. None: the model's.
        example_batch: one microbatch, or meta tensors with its shapes. Tensor and pipeline parallelism trace it to make
            the plan; without it the plan is made when the first batch arrives.
        optimizer: replaces the configured one: ``params -> torch.optim.Optimizer``, or one over the model's parameters.
        lr_scheduler: ``update -> factor``, ``optimizer -> LRScheduler``, or a scheduler over the passed ``optimizer``.
        inputs: entries of a batch that forward receives: keys, positions or ``microbatch -> arguments``. None: the
            whole batch if there is no ``loss_fn``, otherwise the entries that match parameters of forward.
        whole: keys or positions of entries of the batch that are not split into microbatches.
        world: this rank's identity, for ranks that are threads (``run_thread_ranks``); None: read from the launcher.

    Raises:
        ConfigError, GridError, PlanError: one sentence per problem, raised before communication. Some problems are
            raised after it, on all ranks, such as different arguments of ranks, or that rank 0 found no tensor plan.
    """
    resources = EngineResources()
    resources.add((words := FailureMessage()).close)
    try:
        world = world or read_world()
        resources.add(open_console(world.rank))
        resolved = load_config(config, world.size)
        made, notes = unwrap(make_model(model, resolved.seed, world.device))
        rows = BatchRows.of(whole, example_batch, resolved.micro)
        resolved = replacing_sections(resolved, optimizer, lr_scheduler, (*notes, *rows.notes))
        forward = ForwardInputs.of(made, loss_fn is not None, inputs, {KEY} if resolved.router_replay else ())
        request = Request(with_targets(loss_fn, forward), None, lr_scheduler, example_batch, rows=rows, inputs=forward)
        resources.add(request.patches.remove)
        resolved = freeze_untrained(take_model(made, request.patches), resolved, optimizer, request.patches)
        return _initialize(made, resolved, _with(optimizer, request, made, resolved), world, resources, words)
    except BaseException:
        resources.close()
        raise


def _with(
    optimizer: OptimizerFactory | torch.optim.Optimizer | None, request: Request, model: nn.Module, config: Config
) -> Request:
    """Returns the request with the optimizer as a factory, and with the frozen parameters that it includes."""
    check_scheduler(request.lr_scheduler, optimizer)
    request = request.completed(model, config)
    whole = optimizer is not None and declares_whole(optimizer)
    if isinstance(optimizer, torch.optim.Optimizer):
        with as_trainable(model, request.included):
            given = read_optimizer(optimizer, model, config.optimizer)
        request, optimizer = replace(request, given=given), given.factory
    if not whole or optimizer is None:
        return replace(request, optimizer=optimizer)
    rule = OwnWholeRule(optimizer)
    return replace(request, optimizer=partial(FlatWhole, make=optimizer, known=rule.known), whole=rule)


def _initialize(
    model: nn.Module, config: Config, request: Request, world: World, resources: EngineResources, words: FailureMessage
) -> Engine:
    config = config if is_host(world.device) else config.for_accelerators()
    files, given = model_files(model), describe_input(model, config, world.device)
    prepare(model, config, request)
    changes = change_forwards(model, config, world.device, request.patches)
    request = replace(request, changes=changes, lender=world.lender)
    waits = needs_example(config) and request.example_batch is None
    known = None
    # a plan that needs no other rank is made before the rendezvous, so that its errors do not leave ranks waiting
    if not waits and not needs_profiling(config) and not needs_search(config):
        with say_if_slow(PLANNING, world.rank), as_trainable(model, request.included):
            known = plan_run(model, config, request, request.example_batch)
    comm, watchdog = _open_comm(config, world, given)
    resources.add(comm.close)
    resources.refuse_by(comm.failures.refuse)
    if request.lender is not None:
        resources.refuse_by(_refuse_writes)
    if watchdog is not None:
        resources.add(watchdog.close)
        comm.recorder, words.heard = watchdog.recorder, watchdog.recorder.say
    coordinator = CheckpointCoordinator(model, config, comm, world.device, files)
    resources.add(coordinator.release)
    builder = RankBuilder(
        model=model,
        config=config,
        request=request,
        comm=comm,
        device=world.device,
        prepare=coordinator.hold_folder,
        known=known,
    )
    parts = EngineParts(builder, coordinator, resources)
    if not waits:
        parts.complete(request.example_batch)
    return Engine(parts)


def _refuse_writes(call: str) -> None:
    """Refuses calls that would write, move or free the frozen parameters of another engine."""
    if call in ("offload_states", "full_parameters", "copy_weights_from"):
        raise EngineError(
            f"{call} was called on an engine that borrows its frozen parameters from another engine, where it would "
            "change them too; call it on that engine."
        )


def _open_comm(config: Config, world: World, given: Mapping[str, str]) -> tuple[Comm, Watchdog | None]:
    """Connects all ranks, refuses different input, then creates the groups, and a watchdog for ranks or sites."""
    grid = config.grid(world.rank)
    if world.lender is not None:
        return world.lender.comm.lend(), None
    if world.connect is not None:
        return Comm(grid, world.connect(grid)), None
    end_with_agent(os.environ)
    world = replace(world, patience=config.communication.timeout_seconds)
    store = open_store(world)
    reports = joint = watchdog = None
    with say_if_slow("waiting for all ranks", world.rank):
        if world.size > 1:
            rendezvous = Rendezvous(
                store, world.rank, world.size, meeting_point(world), timeout_seconds(world.patience)
            )
            if (difference := rendezvous.meet(given)) is not None:
                raise difference_error(difference)
            store = prefixed(store, rendezvous.name)
            reports = FailureReports(store, world.rank)
            joint = JointCalls(store, world.rank, world.size, timeout_seconds(world.patience))
            watchdog = open_watchdog(config, grid, store, rendezvous.name)
        elif config.outer is not None:  # `trine watch` shows the site
            watchdog = open_watchdog(config, grid, store, f"site{config.outer.site}-{token_hex(4)}")
        open_world(world, store)
    comm = Comm(grid, open_backend(grid, world.device))
    comm.reports, comm.joint = reports, joint
    if world.size > 1:
        comm.failures = FailedCalls(store, world.rank, world.size, comm.close)
    return comm, watchdog
