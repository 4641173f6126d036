"""Mutable parts of an engine: the ones made by ``initialize``, and the ones built with the first batch."""

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from engine.build.assemble import build, measure_model, plan_run, search_model
from engine.build.request import Request
from engine.checkpoint.coordinator import CheckpointCoordinator
from engine.checkpoint.full_state import state_entries
from engine.config import Config
from engine.errors import EngineError
from engine.generation.generator import TextGenerator
from engine.optim.param_groups import as_trainable
from engine.outer.site import OuterLoop
from engine.parallel.comm.agreement import all_or_none, from_first
from engine.parallel.comm.comm import Comm
from engine.parallel.comm.world import patience_seconds
from engine.planning.analysis import needs_search
from engine.planning.found_styles import FoundStyles
from engine.planning.fused_layers import measured_overlap
from engine.planning.plan import Plan
from engine.planning.profile_calls import Costs, needs_profiling
from engine.program.batch import Batch
from engine.program.program import outside_inference_mode
from engine.reporting.banner import banner_text
from engine.reporting.console import say_if_slow
from engine.reporting.sinks import StepReporter
from engine.reporting.step_report import StepReport
from engine.step.batch_check import take_batch
from engine.step.parts import StepPart
from engine.step.runner import FinishedStep, StepRunner
from engine.step.runtime import RankRuntime
from engine.step.update import Update
from engine.step.user_loop import LoopControl, LoopState, UserLoop

if TYPE_CHECKING:
    from engine.weights_out.publisher import WeightPublisher

logger = logging.getLogger("trine")

_TIMING = "timing the calls of the model"
_SEARCHING = "searching the tensor plan"
PLANNING = "planning (trace, tensor plan, pipeline stages)"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBuilder:
    """Callable that shards and patches the model on this rank for an example batch. It returns the objects that run
    steps.
    """

    model: nn.Module
    config: Config
    request: Request
    comm: Comm
    device: torch.device
    prepare: Callable[[], None]
    """Call that may fail on this rank alone; it runs before the model is changed."""
    known: Plan | None
    """Plan that could be made before the process group was open; None if it needs a batch."""

    def __call__(self, example: Batch, problem: BaseException | None) -> RankRuntime:
        """Plans and builds. Collective."""
        rank = self.comm.grid.rank
        with as_trainable(self.model, self.request.included):
            plan = self._plan(example, problem)
            with say_if_slow("placing the model", rank):
                runtime = build(self.model, plan, self.comm, self.device, self.request, example)
        if rank == 0 and self.request.lender is None:  # else one banner for each tenant of a service
            logger.info(banner_text(plan, str(self.device), measured_overlap(self.config, self.device)))
        return runtime

    def _plan(self, example: Batch, problem: BaseException | None) -> Plan:
        """Returns the known plan or makes it now; ``problem``, or an error while planning, is raised on all ranks."""
        given, costs, found = (self.model, self.config, self.request, example), None, None
        if needs_profiling(self.config):
            measured = self._by_first(lambda: measure_model(*given, self.device), _TIMING, problem)
            costs = Costs.from_bytes(measured)
        if needs_search(self.config):
            found = FoundStyles.from_bytes(self._by_first(lambda: search_model(*given), _SEARCHING, problem))
        with all_or_none(self.comm, self.device), say_if_slow(PLANNING, self.comm.grid.rank):
            if problem is not None:
                raise problem
            self.prepare()
            return self.known or plan_run(*given, costs, found)

    def _by_first(self, make: Callable[[], Costs | FoundStyles], what: str, problem: BaseException | None) -> bytes:
        """Returns rank 0's result on every rank; a ``problem`` of rank 0 replaces it, and every rank raises its own."""

        def made() -> bytes:
            if problem is not None:
                raise problem
            return make().to_bytes()

        with say_if_slow(what, self.comm.grid.rank):
            try:
                # ranks that are threads wait without a limit
                patience = patience_seconds() if self.comm.reports is not None else None
                return from_first(made, self.comm, self.device, patience)
            except EngineError:
                if problem is None:
                    raise
                raise problem from None


class EngineResources:
    """Stack of callbacks that release an engine's patches, logs, signal handlers, process groups and shared memory.

    They run in ``close``, or when Python collects the engine.
    """

    def __init__(self) -> None:
        self._closers = ExitStack()
        self._closed = False
        self._refusals: list[Callable[[str], object]] = []
        self._process = os.getpid()

    def add(self, close: Callable[[], object]) -> None:
        """Adds ``close``, a callback that releases one resource. It must not wait for other ranks, and must allow a
        second call.
        """
        self._closers.callback(close)

    def close(self) -> None:
        """Runs all callbacks, the last added first. An error does not stop the other callbacks; it is raised at the
        end.
        """
        self._closed = True
        self._closers.close()

    def refuse_by(self, check: Callable[[str], object]) -> None:
        """Registers ``check``, which is called with each engine method's name before the method runs, and raises to
        forbid it.
        """
        if check not in self._refusals:
            self._refusals.append(check)

    def refuse_no_more_by(self, check: Callable[[str], object]) -> None:
        """Unregisters a callback of ``refuse_by``; does nothing if it is not registered."""
        self._refusals = [known for known in self._refusals if known != check]

    def refuse_closed(self, call: str) -> None:
        """Checks that the engine method ``call`` is allowed.

        Raises:
            EngineError: the engine is closed, or a callback registered with ``refuse_by`` forbids the call.
        """
        if self._closed:
            raise EngineError(
                f"{call} was called after close(), which released the engine's parts; build a new engine with "
                "engine.initialize."
            )
        for check in self._refusals:
            check(call)

    def __del__(
        self, is_finalizing: Callable[[], bool] = sys.is_finalizing, getpid: Callable[[], int] = os.getpid
    ) -> None:
        """Closes, except in a forked child, whose parent still uses everything, and at interpreter exit.

        An engine that a script has not closed outlives the names of this module, which the interpreter clears first.
        The collector may run inside of a trace or transform of another engine, which must not see these calls.
        """
        if not is_finalizing() and getpid() == self._process:
            with torch._C.DisableTorchFunction(), torch._C._DisableFuncTorch(), _disable_current_modes():
                self.close()


class EngineParts:
    """State of an engine: model, configuration, communication, checkpoints and, once the model is sharded, the objects
    that run steps.
    """

    runner: StepRunner
    """Runner of training steps; set once the model is sharded."""
    generator: TextGenerator
    """Generator of text; set once the model is sharded."""

    def __init__(self, builder: RankBuilder, coordinator: CheckpointCoordinator, resources: EngineResources) -> None:
        self.builder, self.model, self.config, self.comm = builder, builder.model, builder.config, builder.comm
        self.grid, self.device, self.rows = builder.comm.grid, builder.device, builder.request.rows
        self.checkpoints, self.resources = coordinator, resources
        self.built: RankRuntime | None = None
        self.loop: UserLoop | None = None
        """The user's loop; None until the engine is built."""
        self.publisher: WeightPublisher | None = None
        """Publisher of the weights; None without "weights_out", or until the engine is built."""
        self.control = LoopControl(managed=self.config.managed_gradient_accumulation)
        self.update = Update(self.config, self.comm, self.device)
        self.reports = StepReporter(self.config, self.comm, self.device)
        resources.add(self.reports.close)

    @outside_inference_mode()
    def complete(self, example: Batch, problem: BaseException | None = None) -> None:
        """Shards the model for microbatches with the shapes of ``example``. Later calls do nothing. Collective.

        ``problem``: error that this rank raises in place of sharding; all other ranks raise too.
        """
        if self.built is None:
            entries = state_entries(self.model)
            self.built = self.builder(example, problem)
            self.resources.add(self.built.close)
            if self.built.averaged is not None:
                self.resources.refuse_by(self.built.averaged.refuse)
            self.runner = StepRunner(self.model, self.built, self.update, self.checkpoints.control)
            self.loop = UserLoop(self.runner, self.built, self.control)
            self.generator = TextGenerator(self.model, self.built, self.runner)
            self.reports.built(self.built)
            if (outer := self.built.parts.find(OuterLoop)) is not None:
                self.checkpoints.register({"outer": outer})
            self.checkpoints.built(self.built, self.update, entries)
            for part in self.built.parts.having(StepPart.restarted):
                part.restarted(self.update.made)
            if self.config.weights_out is not None:
                from engine.weights_out.consumers import open_consumers  # needs the packages of a server
                from engine.weights_out.publisher import WeightPublisher

                consumers = open_consumers(self.config.weights_out, self.device) if self.grid.rank == 0 else ()
                run = self.checkpoints.placed("weights_out")
                self.publisher = WeightPublisher(run, self.config.weights_out, consumers)
                self.resources.add(self.publisher.close)
            if outer is not None:
                outer.join_early()

    @property
    def runtime(self) -> RankRuntime:
        """Objects that run steps on this rank: sharded model, optimizer and executor.

        Raises:
            EngineError: no batch was passed yet, so the model is not sharded.
        """
        if self.built is None:
            raise EngineError(
                "the model cannot be placed on the grid before a batch is passed; pass example_batch=... to "
                "engine.initialize, or train a batch first."
            )
        return self.built

    def completed(self, batch: Batch | Iterator[Batch]) -> Batch | Iterator[Batch]:
        """Shards the model for the shapes of ``batch`` if it is not sharded yet (collective). Returns the batch to
        train on.

        Train on the result in place of ``batch``, because sharding pulls microbatches from an iterator.
        """
        if self.built is not None:
            return batch
        take = partial(self.rows.take_microbatches, batch, self.config.micro, self.config.given_microbatches)
        seen, problem, _ = take_batch(take, self.comm, self.device)
        if not seen and problem is None:
            problem = EngineError(
                "the first list of microbatches is empty on a data rank, but the plan of the run needs an example; "
                "pass example_batch=... to engine.initialize."
            )
        self.complete(seen[0] if seen else None, problem)
        return seen if self.config.uneven_microbatches else iter(seen)

    def refuse_unfinished(self, call: str) -> None:
        """Raises EngineError if the engine method ``call`` is not allowed now: after ``close``, or inside an unfinished
        accumulation.
        """
        self.resources.refuse_closed(call)
        if self.loop is not None and self.loop.state is not LoopState.LEFT:
            self.loop.leave(call)

    def noting_call(self) -> AbstractContextManager[None]:
        """Returns a context that marks an engine call in this rank's communication log, with the number of updates."""
        return self.comm.within(lambda: self.update.made)

    @contextmanager
    def evaluated(self) -> Iterator[None]:
        """Opens a context for evaluations, outside of inference mode. With a schedule-free optimizer, the model has the
        averaged weights inside it.
        """
        averaged = self.built.averaged if self.built is not None else None
        taken = averaged is not None and averaged.by_itself and not averaged.inside
        with outside_inference_mode(), self.runtime.averaging() if taken else nullcontext():
            yield

    def recorded(self, batch: Batch, rows: int | None) -> tuple[Any, Tensor]:
        """Returns the model's output for ``batch``, and the experts that routers chose, int32 [rows, positions, layers,
        k].

        ``rows``: rows of a microbatch; None: the configured number.

        Raises:
            EngineError: ``router_replay`` is off.
        """
        replay = self.runtime.program.replay
        if replay is None:
            raise EngineError(
                "predict was called with record_routing, but router_replay is off, so the choices of routers are not "
                'seen; set "router_replay": true.'
            )
        with replay.recording() as found:
            output = self.runner.predict(batch, rows)
        return output, replay.joined(found, self.rows.count(batch), self.comm, self.device)

    def report(self, finished: FinishedStep) -> StepReport:
        """Writes the report of a finished training step to the configured logs and returns it.

        Also saves a checkpoint and publishes weights if they are due.

        Raises:
            EngineError: ``max_skipped_steps`` steps in a row were skipped.
        """
        step, outcome = finished
        report = self.reports.record(step, outcome, self.runtime.plan, self.update.made)
        kernels = self.builder.request.changes.kernels
        if self.reports.attempts == 1 and self.grid.rank == 0 and (chosen := kernels.summary()):
            logger.info("kernels: %s", chosen)
        self.update.check(outcome)
        if outcome.totals.stops or self.checkpoints.due:
            self.checkpoints.after_step(not outcome.skipped, outcome.totals.terminated, outcome.totals.ends_trial)
        if self.publisher is not None:
            self.publisher.after_step(not outcome.skipped)
        if outcome.totals.ends_trial:
            self.checkpoints.control.end_trial()
        return report
