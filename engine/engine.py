"""The engine: the user's interface to a run; it calls the parts in order and computes nothing itself.

train_batch    complete the build (first batch) -> StepRunner.train -> report -> checkpoint if it is time
"""

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Literal, NoReturn, Self, overload

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from engine.build.request import BuildRuntime
from engine.checkpoint.coordinator import CheckpointCoordinator
from engine.checkpoint.full_state import state_entries
from engine.checkpoint.resume import LoadOptions
from engine.checkpoint.writer import PendingSave
from engine.config import Config
from engine.errors import EngineError
from engine.inference import Inference
from engine.loop import TrainingLoop
from engine.named_state import NamedState
from engine.parallel.comm.comm import Comm
from engine.parallel.comm.traffic import Tally
from engine.parallel.grid import Axis, Grid
from engine.parallel.pipeline.report.measured import measured_timeline
from engine.parallel.pipeline.schedule.simulate import StepTimeline
from engine.planning.plan import Plan
from engine.program.batch import Batch, join_outputs
from engine.program.batch_rows import BatchRows
from engine.reporting.banner import compare_traffic
from engine.reporting.compilations import say_what_compiles
from engine.reporting.console import say_if_slow
from engine.reporting.sinks import StepReporter
from engine.reporting.step_report import StepReport
from engine.resources import EngineResources
from engine.step.batch_check import take_batch
from engine.step.parts import StepPart
from engine.step.runner import FinishedStep, StepRunner
from engine.step.runtime import RankRuntime
from engine.step.update import Update
from engine.step.user_loop import LoopControl, LoopState, UserLoop

logger = logging.getLogger("trine")

Path_ = str | os.PathLike[str]


class Engine(TrainingLoop, NamedState, Inference):
    """A model on its grid. Made by :func:`engine.initialize`; a context manager that closes itself.

    If a plan needs a batch and no example was given, the parts are built when the first batch arrives. An engine that
    is dropped without ``close`` releases its resources when Python collects it.
    """

    def __init__(self, build: BuildRuntime, coordinator: CheckpointCoordinator, resources: EngineResources) -> None:
        self._build, self._model, self._config, self._comm = build, build.model, build.config, build.comm
        self._grid, self._device = self._comm.grid, coordinator.device
        self._built: RankRuntime | None = None
        self._loop: UserLoop | None = None
        self._control = LoopControl(managed=self._config.managed_gradient_accumulation)
        self._update = Update(self._config, self._comm, self._device)
        self._reports = StepReporter(self._config, self._comm, self._device)
        self._checkpoints, self._resources = coordinator, resources
        resources.add(self._reports.close)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse to be copied or pickled."""
        raise EngineError(
            "an engine holds process groups, hooks and shards, so it is neither copied nor pickled; save its state by "
            "eng.save_checkpoint(), its model by eng.full_state_dict(), and build another by engine.initialize."
        )

    def complete(self, example: Batch, problem: BaseException | None = None) -> None:
        """Build the missing parts, for microbatches like ``example``. Collective; ``initialize`` calls it.

        ``problem``: the reason why this rank has no example. It is raised here, and all other ranks raise too.
        """
        if self._built is None:
            entries = state_entries(self._model)
            self._built = self._build(example, problem)
            self._resources.add(self._built.close)
            if self._built.averaged is not None:
                self._resources.refuse_by(self._built.averaged.refuse)
            self._runner = StepRunner(self._model, self._built, self._update, self._checkpoints.control)
            self._loop = UserLoop(self._runner, self._built, self._control)
            self._reports.built(self._built)
            self._checkpoints.built(self._built, self._update, entries)
            for part in self._built.parts.having(StepPart.restarted):
                part.restarted(self._update.made)

    @property
    def _runtime(self) -> RankRuntime:
        if self._built is None:
            raise EngineError(
                "the plan needs a batch, and no batch has been given yet; pass example_batch=... to engine.initialize, "
                "or train a batch first."
            )
        return self._built

    @property
    def plan(self) -> Plan:
        """The plan: what every rank holds, does and sends."""
        return self._runtime.plan

    @property
    def batch_rows(self) -> BatchRows:
        """Which tensors of a batch are cut into microbatches, and which are not."""
        return self._build.rows

    @property
    def config(self) -> Config:
        """The resolved configuration."""
        return self._config

    @property
    def grid(self) -> Grid:
        """The grid, with this rank's position."""
        return self._grid

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return self._device

    @property
    def comm(self) -> Comm:
        """Communication of this rank, counted by axis and label."""
        return self._comm

    @property
    def module(self) -> nn.Module:
        """The user's model; its parameters are views of the flat buckets (ZeRO 3: see ``full_parameters``)."""
        return self._model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The inner optimizer, over this rank's weights."""
        return self._runtime.optimizer.inner

    @property
    def step_count(self) -> int:
        """Number of updates; skipped steps do not count."""
        return self._update.made

    @property
    def skipped_steps(self) -> int:
        """Number of steps that were skipped because the gradient was not finite."""
        return self._update.skipped

    @property
    def lr(self) -> float:
        """Learning rate of the first group in the next update."""
        return self._runtime.learning_rate.at(self._update.made)

    @property
    def built(self) -> bool:
        """Whether the parts are there; a plan may wait for the first batch."""
        return self._built is not None

    @property
    def loss_scale(self) -> float:
        """The loss scale of the next step; 1 except under fp16."""
        return self._update.scale.value

    @property
    def lr_scheduler(self) -> LRScheduler | None:
        """The torch scheduler of the run; None: the rate is a function of the update, or constant."""
        return self._runtime.learning_rate.scheduler

    @property
    def sent(self) -> Tally:
        """Traffic of this rank so far, by axis and label."""
        return self._comm.tally.copy()

    @property
    def waits(self) -> Mapping[Axis, float]:
        """Seconds that this rank has waited for communication so far, by axis; empty where no watchdog watches."""
        return self._comm.recorder.waits if self._comm.recorder is not None else {}

    def explain(self, module: str = "") -> str:
        """List the patches around a module of the model, outside to inside, one line per patch: pipeline stage, gather,
        recomputation, casts, sharding, kernel; modules around it first, then those in it.

        Args:
            module: its name, as in ``model.named_modules()``; empty: the whole model.

        Raises:
            EngineError: the model has no module of that name.
        """
        lines = self._runtime.patches.explain(self._model, module)
        return "\n".join(lines) or f"{module or 'the model'}: runs as it is, without a patch of the engine"

    def timeline(self) -> StepTimeline:
        """The measured timeline of this pipeline's ranks in the last ``train_batch``; collective over axis pp.

        ``draw`` shows it beside what ``simulate(plan.schedule)`` of ``engine.parallel.pipeline`` predicts.
        """
        self._resources.refuse_closed("timeline")
        return measured_timeline(self.plan.schedule, self._runtime.executor, self._comm, self._device)

    def traffic_report(self) -> str:
        """Planned and measured bytes of a training step on this rank, side by side."""
        return compare_traffic(self.plan, self._reports.trained, self.grid.rank, max(1, self._reports.attempts))

    # ------------------------------------------------------------------ whole steps

    def train_batch(self, batch: Batch | Iterator[Batch]) -> StepReport:
        """One optimizer step on this data rank's share of the global batch.

        Args:
            batch: tensor, tuple, list or mapping whose tensors have micro x accumulation rows, or an
                iterator of microbatches, from which exactly ``accumulation`` items are pulled.

        Communicates values and their gradients over pp, activations over tp, gradients and parameters over
        dp, a digest of the batch over the replica and eight scalars over the world.

        Raises:
            EngineError: the batch is bad, or differs from that of its replica: all ranks raise, each its own error, and
                nothing is updated. Without tensor ranks, pipeline ranks and sharded parameters, the same holds for any
                other failure; with them, a rank that fails during the schedule raises at once and the job ends. After
                too many skipped steps in a row (``watchdog.max_skipped_steps``) all ranks raise the same error.
        """
        self._refuse_unfinished("train_batch")
        if not torch.is_grad_enabled():
            raise EngineError(
                "train_batch under torch.no_grad, which records no gradients; call it outside of no_grad."
            )
        with self._comm.within(self._update.made):
            with self._comm.noted("train_batch"):
                pass  # nobody is waited for: it would cost every step
            batch = self._completed(batch)
            if self._reports.attempts:
                return self._report(self._runner.train(batch))
            first = f"the first step{', which compiles blocks' * self._config.compile}"
            with say_what_compiles(self.device, self._grid.rank), say_if_slow(first, self._grid.rank):
                return self._report(self._runner.train(batch))

    @overload
    def eval_batch(self, batch: Batch | Iterator[Batch], return_output: Literal[False] = False) -> StepReport: ...

    @overload
    def eval_batch(self, batch: Batch | Iterator[Batch], return_output: Literal[True]) -> tuple[StepReport, Any]: ...

    @torch.no_grad()
    def eval_batch(
        self, batch: Batch | Iterator[Batch], return_output: bool = False
    ) -> StepReport | tuple[StepReport, Any]:
        """Loss of a batch without a step, with every module in eval mode; the random state is restored.

        With ``return_output``: (report, model output of rank 0's share, None on other ranks).
        """
        self._resources.refuse_closed("eval_batch")
        with self._comm.within(self._update.made):
            self._comm.join("eval_batch")
            batch = self._completed(batch)
            with self._evaluated():
                step, outcome = self._runner.evaluate(batch, "output" if return_output else "evaluate")
        report = self._reports.make(step, outcome, self.plan, self._update.made)
        if not return_output:
            return report
        return report, join_outputs(step.outputs) if step.outputs and self._grid.rank == 0 else None

    def gather_rows(self, rows: Tensor) -> Tensor:
        """The rows [b, ...] of all data ranks, [data ranks * b, ...] in their order, with exact gradients. Collective.

        For a loss that compares rows (CLIP, SigLIP), in a loop of the user's own. A ``loss_fn`` that names an argument
        ``gather_rows`` is given it, on pipelines too. All data ranks give equal shapes. Each rank may compute the loss
        of all rows, or of its own against all: the step averages over data ranks, or divides sum by weight. Each
        microbatch gathers for itself. An all-gather over dp in forward and a reduce-scatter in backward, label
        "gathered rows", which ``plan`` does not count.

        Raises:
            EngineError: no tensor with rows.
        """
        self._resources.refuse_closed("gather_rows")
        return self._runtime.program.gather(rows)

    # ------------------------------------------------------------------ state

    def register_for_checkpointing(self, **things: Any) -> None:
        """Save and load other objects too, such as ``data=sampler``; its ``state_dict`` is JSON, equal on all ranks."""
        self._resources.refuse_closed("register_for_checkpointing")
        self._checkpoints.register(things)

    def save_checkpoint(
        self, folder: Path_ | None = None, client_state: Any = None, without_frozen: bool = False
    ) -> PendingSave:
        """Begin a checkpoint ``folder/step-N``; returns once this rank's share is copied. Collective.

        It appears once all ranks have written and every tensor is complete, or not at all; ``wait()`` on the result
        blocks until then and raises if the save failed, which is also logged. Weights are sent over a host group.

        Args:
            folder: folder of the run; None: ``checkpoint.folder``, which keeps the newest ``checkpoint.keep``.
            client_state: any JSON value but a string; that of rank 0 is saved, and ``load_checkpoint`` returns it.
            without_frozen: leave frozen parameters out, as ``checkpoint.frozen`` false does; the same on all ranks.

        Raises:
            EngineError: ``client_state`` is a string, such as a tag of DeepSpeed's. Problems of the save itself, such
                as another engine that saves into the folder, are raised by ``wait()`` on all ranks.
        """
        self._resources.refuse_closed("save_checkpoint")
        self._note_unfinished("save_checkpoint")
        self._comm.join(f"save_checkpoint{'(without_frozen=True)' * without_frozen}")
        return self._checkpoints.save(folder, client_state if client_state is not None else {}, without_frozen)

    def load_checkpoint(
        self,
        folder: Path_ | None = None,
        *,
        load_module_only: bool = False,
        load_optimizer_states: bool = True,
        strict: bool = True,
        missing_ok: bool = False,
        load_lr_scheduler_states: bool = True,
    ) -> Any:
        """Continue from the newest checkpoint of a run (or from ``.../step-N``), saved on any grid. Collective.

        Returns its client state; a dict is not iterable, since DeepSpeed's pair is unpacked. Every block that is read
        is checked. With ``load_module_only``, only weights and buffers are loaded; without
        ``load_optimizer_states``, everything else is loaded and the optimizer starts fresh. Without ``strict``,
        parameters and buffers that the checkpoint lacks keep their values, and those that were not trained get fresh
        optimizer state; the log names them. With ``missing_ok``, a folder without a checkpoint returns None. Without
        ``load_lr_scheduler_states``, a torch scheduler starts anew after the next update, which has the saved rate.

        Raises:
            CheckpointError: there is no checkpoint; it is damaged (names file, tensor and the last good checkpoint), or
                belongs to another model (names the first difference); ranks gave other folders. Raised on all ranks.
            EngineError: without ``load_lr_scheduler_states``, the rates are a function of the update.
        """
        self._refuse_unfinished("load_checkpoint")
        self._comm.join("load_checkpoint")
        if self._built is not None:
            self._built.settle()
        options = LoadOptions(
            module_only=load_module_only,
            optimizer_states=load_optimizer_states,
            strict=strict,
            scheduler_states=load_lr_scheduler_states,
        )
        return self._checkpoints.load(folder, self._update, options, missing_ok)

    def copy_weights_from(self, other: "Engine") -> None:
        """Take parameters and persistent buffers of another engine on the same ranks, on any grid. Collective.

        For a generator or a reference that follows a policy. Masters are read where the other engine has them; the
        state of this engine's optimizer stays. Full tensors are on a rank in chunks of at most 256 MiB, each one
        all-reduced over the world, label "weights".

        Raises:
            EngineError: the models differ, the engines have different numbers of ranks, or this engine has gradients
                of an unfinished accumulation.
        """
        self._refuse_unfinished("copy_weights_from")
        other._resources.refuse_closed("copy_weights_from")
        for eng in (self, other):
            if (gatherer := eng._runtime.gatherer) is not None:
                gatherer.refuse_opened("copy_weights_from")
        self._comm.join("copy_weights_from")
        with self._runtime.changing(), other._runtime.changing():
            self._checkpoints.copy_weights(other._checkpoints)

    def close(self) -> None:
        """End the engine: wait for a pending checkpoint, remove every patch from the model, close logs and groups.

        Classes, attributes and hooks of the model's modules are then what they were before ``initialize``; parameters
        keep what this rank holds: shards where they are sharded, placeholders for what other stages hold. Only
        ``engine.deepspeed`` takes a model in shards again, and nobody one in parts of tensor or pipeline ranks.
        Groups are destroyed on this rank, independently of other ranks. The process group itself lives until the
        interpreter exits: other engines may use it.

        An engine that is dropped instead is closed when Python collects it, except that nothing waits for a pending
        checkpoint, whose thread finishes writing it.
        """
        try:
            self._checkpoints.close()  # raises if a failed save stops the run
        finally:
            self._resources.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------ around a step

    def _refuse_unfinished(self, call: str) -> None:
        self._resources.refuse_closed(call)
        if self._loop is not None and self._loop.state is not LoopState.LEFT:
            self._loop.leave(call)

    def _note_unfinished(self, call: str) -> None:
        if self._loop is not None and self._loop.unfinished and self._grid.rank == 0:
            logger.warning(
                "%s inside an unfinished accumulation keeps the state after update %d: the gradients of %d "
                "microbatch(es) are not saved; training goes on with them.",
                call,
                self._update.made,
                self._loop.unfinished,
            )

    def _completed(self, batch: Batch | Iterator[Batch]) -> Batch | Iterator[Batch]:
        """``batch`` itself; the first batch completes the build and is returned as an iterator of its microbatches."""
        if self._built is not None:
            return batch
        config, rows = self._config, self._build.rows
        take = partial(rows.take_microbatches, batch, config.micro, config.accumulation)
        seen, problem, _ = take_batch(take, self._comm, self._device)
        self.complete(seen[0] if seen else None, problem)
        return iter(seen)

    def add_callback(self, callback: Callable[[StepReport], object]) -> None:
        """Call ``callback`` with the report of every training step from now on, on this rank, before ``train_batch`` or
        ``step`` returns it. What it raises ends the call; a callback that communicates is added on all ranks."""
        self._reports.tell(callback)

    def _report(self, finished: FinishedStep) -> StepReport:
        step, outcome = finished
        report = self._reports.record(step, outcome, self.plan, self._update.made)
        self._update.check(outcome)
        if outcome.totals.stops or self._checkpoints.due:
            self._checkpoints.after_step(not outcome.skipped, bool(outcome.totals.stops))
        return report
