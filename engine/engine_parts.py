"""The parts of an engine, which its calls share: those that are there from the start, and those of the first batch."""

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from engine.build.assemble import build, measure_model, plan_run, search_model
from engine.build.request import Request
from engine.checkpoint.coordinator import CheckpointCoordinator
from engine.checkpoint.full_state import state_entries
from engine.config import Config
from engine.errors import EngineError
from engine.optim.param_groups import as_trainable
from engine.parallel.comm.agreement import all_or_none, from_first
from engine.parallel.comm.comm import Comm
from engine.parallel.comm.world import patience_seconds
from engine.planning.analysis import needs_search
from engine.planning.found_styles import FoundStyles
from engine.planning.fused_layers import measured_overlap
from engine.planning.plan import Plan
from engine.planning.profile_calls import Costs, needs_profiling
from engine.program.batch import Batch
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

logger = logging.getLogger("trine")

_TIMING = "timing the calls of the model"
_SEARCHING = "searching the tensor plan"
PLANNING = "planning (trace, tensor plan, pipeline stages)"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBuilder:
    """Plans and builds the runtime of this rank, once the process group is open."""

    model: nn.Module
    config: Config
    request: Request
    comm: Comm
    device: torch.device
    prepare: Callable[[], None]
    """What may fail on a rank before the model is changed."""
    known: Plan | None
    """The plan, if it could be made before the group was open."""

    def __call__(self, example: Batch, problem: BaseException | None) -> RankRuntime:
        """Plan and build. Collective."""
        rank = self.comm.grid.rank
        with as_trainable(self.model, self.request.included):
            plan = self._plan(example, problem)
            with say_if_slow("placing the model", rank):
                runtime = build(self.model, plan, self.comm, self.device, self.request, example)
        if rank == 0:
            logger.info(banner_text(plan, str(self.device), measured_overlap(self.config, self.device)))
        return runtime

    def _plan(self, example: Batch, problem: BaseException | None) -> Plan:
        """Return the known plan or make it now; ``problem``, or an error while planning, is raised on all ranks."""
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
        """What rank 0 makes, on every rank; a ``problem`` of rank 0 takes its place, and every rank raises its own."""

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
    """Closes what an engine owns: patches of the model, logs, signal handlers, process groups, shared memory.

    ``close`` does it, or the collection of the engine, whose parts alone refer to this object.

    What is closed refers to the user's model, and the model may refer to the engine. ``weakref.finalize``, which holds
    its callback outside of the engine, would keep both alive; with ``__del__`` the garbage collector finds the cycle.
    """

    def __init__(self) -> None:
        self._closers = ExitStack()
        self._closed = False
        self._refusals: list[Callable[[str], object]] = []
        self._process = os.getpid()

    def add(self, close: Callable[[], object]) -> None:
        """Own something; ``close``, which may be called again, gives it back without waiting for other ranks."""
        self._closers.callback(close)

    def close(self) -> None:
        """Give everything back, the newest first, also what is left when one of them raises."""
        self._closed = True
        self._closers.close()

    def refuse_by(self, check: Callable[[str], object]) -> None:
        """Ask ``check`` too before a call; it raises if it has a reason against the call of that name."""
        if check not in self._refusals:
            self._refusals.append(check)

    def refuse_no_more_by(self, check: Callable[[str], object]) -> None:
        """End what ``refuse_by`` began with ``check``, if it did."""
        self._refusals = [known for known in self._refusals if known != check]

    def refuse_closed(self, call: str) -> None:
        """Refuse ``call`` after ``close``, and whenever a check of ``refuse_by`` does.

        Raises:
            EngineError: everything has been given back, or what the call needs is not there.
        """
        if self._closed:
            raise EngineError(
                f"{call} after close(), which has given back the engine's parts; build a new engine with "
                "engine.initialize."
            )
        for check in self._refusals:
            check(call)

    def __del__(
        self, is_finalizing: Callable[[], bool] = sys.is_finalizing, getpid: Callable[[], int] = os.getpid
    ) -> None:
        """Close; not in a forked child, whose parent still uses everything, nor when the interpreter ends.

        An engine that a script has not closed outlives the names of this module, which the interpreter empties first.
        """
        if not is_finalizing() and getpid() == self._process:
            self.close()


class EngineParts:
    """What the calls of an engine work on.

    If a plan needs a batch and no example was given, ``complete`` is called when the first batch arrives.
    """

    runner: StepRunner
    """Of an engine that is built."""

    def __init__(self, builder: RankBuilder, coordinator: CheckpointCoordinator, resources: EngineResources) -> None:
        self.builder, self.model, self.config, self.comm = builder, builder.model, builder.config, builder.comm
        self.grid, self.device, self.rows = builder.comm.grid, builder.device, builder.request.rows
        self.checkpoints, self.resources = coordinator, resources
        self.built: RankRuntime | None = None
        self.loop: UserLoop | None = None
        """The user's loop; None until the engine is built."""
        self.control = LoopControl(managed=self.config.managed_gradient_accumulation)
        self.update = Update(self.config, self.comm, self.device)
        self.reports = StepReporter(self.config, self.comm, self.device)
        resources.add(self.reports.close)

    def complete(self, example: Batch, problem: BaseException | None = None) -> None:
        """Build the missing parts, for microbatches like ``example``. Collective.

        ``problem``: the reason why this rank has no example. It is raised here, and all other ranks raise too.
        """
        if self.built is None:
            entries = state_entries(self.model)
            self.built = self.builder(example, problem)
            self.resources.add(self.built.close)
            if self.built.averaged is not None:
                self.resources.refuse_by(self.built.averaged.refuse)
            self.runner = StepRunner(self.model, self.built, self.update, self.checkpoints.control)
            self.loop = UserLoop(self.runner, self.built, self.control)
            self.reports.built(self.built)
            self.checkpoints.built(self.built, self.update, entries)
            for part in self.built.parts.having(StepPart.restarted):
                part.restarted(self.update.made)

    @property
    def runtime(self) -> RankRuntime:
        """The parts of this rank.

        Raises:
            EngineError: the engine is not built.
        """
        if self.built is None:
            raise EngineError(
                "the plan needs a batch, and no batch has been given yet; pass example_batch=... to engine.initialize, "
                "or train a batch first."
            )
        return self.built

    def completed(self, batch: Batch | Iterator[Batch]) -> Batch | Iterator[Batch]:
        """``batch`` itself; the first batch completes the build and is returned as an iterator of its microbatches."""
        if self.built is not None:
            return batch
        take = partial(self.rows.take_microbatches, batch, self.config.micro, self.config.accumulation)
        seen, problem, _ = take_batch(take, self.comm, self.device)
        self.complete(seen[0] if seen else None, problem)
        return iter(seen)

    def refuse_unfinished(self, call: str) -> None:
        """Refuse ``call`` after ``close`` and inside an accumulation."""
        self.resources.refuse_closed(call)
        if self.loop is not None and self.loop.state is not LoopState.LEFT:
            self.loop.leave(call)

    def evaluated(self) -> AbstractContextManager[None]:
        """Context of an evaluation, which takes the average of a schedule-free optimizer by itself."""
        averaged = self.built.averaged if self.built is not None else None
        taken = averaged is not None and averaged.by_itself and not averaged.inside
        return self.runtime.averaging() if taken else nullcontext()

    def report(self, finished: FinishedStep) -> StepReport:
        """Report a step that is over, and save a checkpoint if it is time."""
        step, outcome = finished
        report = self.reports.record(step, outcome, self.runtime.plan, self.update.made)
        self.update.check(outcome)
        if outcome.totals.stops or self.checkpoints.due:
            self.checkpoints.after_step(not outcome.skipped, bool(outcome.totals.stops))
        return report
