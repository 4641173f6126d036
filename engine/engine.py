"""Engine: the user's interface to a run; it calls the parts in order and computes nothing itself.

train_batch    complete the build (first batch) -> StepRunner.train -> report -> checkpoint if it is due
"""

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any, Literal, NoReturn, Self, overload

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from engine.checkpoint.resume import LoadOptions
from engine.checkpoint.writer import PendingSave
from engine.config import Config
from engine.config.serve_section import ServeConfig
from engine.engine_parts import EngineParts
from engine.errors import EngineError
from engine.generation.sampling import Completion, GenerationRequest, SamplingOptions
from engine.loop import TrainingLoop
from engine.named_state import NamedState
from engine.outer.site import OuterLoop, OuterState
from engine.parallel.comm.comm import Comm
from engine.parallel.comm.traffic import Tally
from engine.parallel.grid import Axis, Grid
from engine.parallel.pipeline.report.measured import measured_timeline
from engine.parallel.pipeline.schedule.simulate import StepTimeline
from engine.planning.plan import Plan
from engine.program.batch import Batch, join_outputs
from engine.program.batch_rows import BatchRows
from engine.program.program import outside_inference_mode
from engine.reporting.banner import compare_traffic, say_what_compiles
from engine.reporting.console import say_if_slow
from engine.reporting.step_report import StepReport
from engine.step.runtime import RankRuntime

logger = logging.getLogger("trine")

Path_ = str | os.PathLike[str]
ServedFunction = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]
"""Function that clients of a served engine call by name."""


class Engine(TrainingLoop, NamedState):
    """Training engine, a context manager: a model sharded over a grid of ranks. Made by :func:`engine.initialize`.

    Without an ``example_batch``, some configurations shard the model only when the first batch arrives. An engine that
    is dropped without ``close`` releases its resources when Python collects it.
    """

    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Raises an error: an engine can be neither copied nor pickled."""
        raise EngineError(
            "an engine owns process groups, hooks and shards, so it can be neither copied nor pickled; save its "
            "state with eng.save_checkpoint(), its model with eng.full_state_dict(), and build another with "
            "engine.initialize."
        )

    def complete(self, example: Batch, problem: BaseException | None = None) -> None:
        """Shards the model for microbatches shaped like ``example``. Later calls do nothing. Collective.

        ``problem``: error that this rank raises in place of sharding; all other ranks raise too.
        """
        self._parts.complete(example, problem)

    @property
    def _runtime(self) -> RankRuntime:
        return self._parts.runtime

    @property
    def plan(self) -> Plan:
        """Plan of the run: each rank's pipeline actions, messages and bytes of state."""
        return self._parts.runtime.plan

    @property
    def batch_rows(self) -> BatchRows:
        """Rule that divides a batch into microbatches: which tensors are split by rows, and which are not."""
        return self._parts.rows

    @property
    def config(self) -> Config:
        """Configuration of the run, with all defaults filled in."""
        return self._parts.config

    @property
    def grid(self) -> Grid:
        """Grid of ranks (pipeline, data, context and tensor axes), with this rank's coordinates."""
        return self._parts.grid

    @property
    def device(self) -> torch.device:
        """Device of this rank's parameters."""
        return self._parts.device

    @property
    def comm(self) -> Comm:
        """Collectives of this rank, with counts of calls and bytes by axis and label."""
        return self._parts.comm

    @property
    def module(self) -> nn.Module:
        """User's model. Its parameters are views of flat buffers; at ZeRO 3, read them inside ``full_parameters``."""
        return self._parts.model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """torch optimizer over this rank's shards of the master weights."""
        return self._parts.runtime.optimizer.inner

    @property
    def step_count(self) -> int:
        """Number of weight updates so far; skipped steps do not count."""
        return self._parts.update.made

    @property
    def skipped_steps(self) -> int:
        """Number of steps that were skipped because of a non-finite gradient."""
        return self._parts.update.skipped

    @property
    def lr(self) -> float:
        """Learning rate of the first parameter group in the next update."""
        return self._parts.runtime.learning_rate.at(self._parts.update.made)

    @property
    def built(self) -> bool:
        """True once the model is sharded. Without an ``example_batch``, that can happen at the first batch."""
        return self._parts.built is not None

    @property
    def loss_scale(self) -> float:
        """Loss scale of the next step; 1 except under fp16."""
        return self._parts.update.scale.value

    @property
    def lr_scheduler(self) -> LRScheduler | None:
        """torch scheduler that sets the learning rate; None if it is constant or computed from the update count."""
        return self._parts.runtime.learning_rate.scheduler

    @property
    def sent(self) -> Tally:
        """Bytes that this rank has sent so far, by axis and label."""
        return self._parts.comm.tally.copy()

    @property
    def outer(self) -> OuterState | None:
        """Counters of the exchange of updates with other training jobs, such as merges and bytes sent; None without
        ``"outer"`` in the configuration, or before the model is sharded.
        """
        built = self._parts.built
        part = built.parts.find(OuterLoop) if built is not None else None
        return part.state_now if part is not None else None

    @property
    def waits(self) -> Mapping[Axis, float]:
        """Seconds that this rank has waited for communication so far, by axis; empty if the watchdog is off."""
        return self._parts.comm.recorder.waits if self._parts.comm.recorder is not None else {}

    def explain(self, module: str = "") -> str:
        """Returns the patches that the engine has put on a module, one line each.

        Patches of parent modules come first, then patches of the module and of its submodules.

        Args:
            module: name of the module, as in ``model.named_modules()``; empty: the whole model.

        Raises:
            EngineError: the model has no module of that name.
        """
        lines = self._parts.runtime.patches.explain(self._parts.model, module)
        return "\n".join(lines) or f"{module or 'the model'}: runs unchanged, without a patch of the engine"

    def timeline(self) -> StepTimeline:
        """Returns the measured start and end of each pipeline action in the last ``train_batch``. Collective over pp.

        ``draw`` in ``engine.parallel.pipeline`` draws it as text; ``simulate(plan.schedule)`` predicts it.
        """
        self._parts.resources.refuse_closed("timeline")
        return measured_timeline(self.plan.schedule, self._parts.runtime.executor, self._parts.comm, self._parts.device)

    def traffic_report(self) -> str:
        """Returns a table of planned and measured bytes of a training step on this rank; "" for a job of one rank."""
        return compare_traffic(
            self.plan, self._parts.reports.trained, self.grid.rank, max(1, self._parts.reports.attempts)
        )

    # ------------------------------------------------------------------ whole steps

    def train_batch(self, batch: Batch | Iterator[Batch]) -> StepReport:
        """Makes one optimizer step on this data rank's share of the global batch. Collective.

        Args:
            batch: tensor, tuple, list or mapping of tensors with ``train_micro_batch_size_per_gpu`` x
                ``gradient_accumulation_steps`` rows, or an iterator, from which exactly ``gradient_accumulation_steps``
                microbatches are pulled. With ``uneven_microbatches``, a list of this data rank's microbatches, of any
                number.

        Communicates activations and their gradients over pp, activations over tp, gradients and parameters over dp.
        Also sends a digest of the batch over the ranks of one model copy, and nine scalars (more with metrics or
        experts) over the world.

        Raises:
            EngineError: the batch is malformed, or differs between the ranks of one model copy; nothing is updated. Or
                ``max_skipped_steps`` steps in a row were skipped. All ranks raise.
            Exception: another failure before the update; all ranks raise, and nothing is updated. But with tensor
                ranks, pipeline ranks, sharded parameters or experts on other ranks, a rank that fails in a forward or
                backward raises at once, and the job ends.
        """
        self._parts.refuse_unfinished("train_batch")
        if not torch.is_grad_enabled():
            raise EngineError(
                "train_batch was called under torch.no_grad, which records no gradients; call it outside of no_grad."
            )
        with self._parts.noting_call():
            with self._parts.comm.noted("train_batch"):
                pass  # no rank waits for another: that would cost time in every step
            batch = self._parts.completed(batch)
            if self._parts.reports.attempts:
                return self._parts.report(self._parts.runner.train(batch))
            first = f"the first step{', which compiles blocks' * self._parts.config.compile}"
            with say_what_compiles(self.device, self._parts.grid.rank), say_if_slow(first, self._parts.grid.rank):
                return self._parts.report(self._parts.runner.train(batch))

    @overload
    def eval_batch(self, batch: Batch | Iterator[Batch], return_output: Literal[False] = False) -> StepReport: ...

    @overload
    def eval_batch(self, batch: Batch | Iterator[Batch], return_output: Literal[True]) -> tuple[StepReport, Any]: ...

    @torch.no_grad()
    def eval_batch(
        self, batch: Batch | Iterator[Batch], return_output: bool = False
    ) -> StepReport | tuple[StepReport, Any]:
        """Computes the loss of a batch in eval mode, without an update; restores the random state. Collective.

        Returns a report; with ``return_output``, (report, output). On rank 0, the output covers that rank's
        rows; on other ranks it is None.
        """
        self._parts.resources.refuse_closed("eval_batch")
        with self._parts.noting_call():
            self._parts.comm.join("eval_batch")
            batch = self._parts.completed(batch)
            with self._parts.evaluated():
                step, outcome = self._parts.runner.evaluate(batch, "output" if return_output else "evaluate")
        report = self._parts.reports.make(step, outcome, self.plan, self._parts.update.made)
        if not return_output:
            return report
        return report, join_outputs(step.outputs) if step.outputs and self._parts.grid.rank == 0 else None

    # ------------------------------------------------------------------ outputs

    @torch.no_grad()
    def predict(self, batch: Batch, rows: int | None = None, record_routing: bool = False) -> Any:
        """Returns the model's output for this data rank's rows, in eval mode; restores the random state. Collective.

        Args:
            batch: tensor, tuple, list or mapping of any number of rows, which may differ between data ranks; labels are
                not needed.
            rows: number of rows of a microbatch; the last one may have fewer. None: ``train_micro_batch_size_per_gpu``.
                Pass the number of rows of the whole batch if one of its tensors cannot be split by rows (image
                patches).
            record_routing: return (output, experts): the experts that routers chose, int32 [rows, positions, layers,
                k]. A later batch can replay them under the key ``routed_experts``. Needs ``router_replay``.

        Every rank of one model copy gets the full output: logits are gathered over tp, and the last stage sends them
        over pp (traffic label "outputs"). Under ZeRO 3, data ranks agree on the number of forwards (8 bytes over dp).

        Raises:
            EngineError: the batch is malformed, or differs between ranks of one model copy; all its ranks raise.
        """
        self._open("predict")
        with self._parts.evaluated():
            if not record_routing:
                return self._parts.runner.predict(batch, rows)
            return self._parts.recorded(batch, rows)

    @torch.no_grad()
    def generate(
        self,
        inputs: Tensor | Sequence[Sequence[int]],
        *,
        sampling: SamplingOptions | Sequence[SamplingOptions] | None = None,
        **options: Any,
    ) -> Any:
        """Continues this data rank's prompts, with the engine's sampler if ``sampling`` is given, else with the model's
        own ``generate`` (Hugging Face). Collective.

        Args:
            inputs: token ids of this data rank's prompts [rows, tokens]; rows and tokens may differ between data ranks.
                With ``sampling``, a list of lists also works.
            sampling: options of all rows, or of each row; works with any causal model. None: Hugging Face's
                ``generate`` (beams, stopping criteria).
            options: without ``sampling``, options of ``generate``, such as ``max_new_tokens``; with it,
                ``attention_mask`` only.

        Returns prompts and new tokens [rows * samples, tokens], or :class:`GeneratedText` if ``sampling`` asks for
        log-probabilities; without ``sampling`` the result of ``generate``. All ranks of one model copy get the same.

        Each rank caches keys and values of its own heads and layers, if the model takes a cache. Each token costs the
        traffic of its forward, and 8 bytes a row over the model copy. Data ranks that gather parameters or share
        experts also exchange 8 bytes over dp before each forward. Without ``sampling``, the last stage sends the logits
        over pp, label "outputs".

        Raises:
            EngineError: the model does not generate, the prompts are not token ids, options do not fit ``sampling``, or
                an accumulation is unfinished.
        """
        self._open_generation("generate")
        with self._parts.evaluated():
            if sampling is None:
                return self._parts.generator.by_transformers(inputs, options)
            mask = options.pop("attention_mask", None)
            if options:
                raise EngineError(
                    f"generate was given sampling and {', '.join(sorted(options))}; set these in SamplingOptions, or "
                    "leave sampling out for the options of Hugging Face's generate."
                )
            return self._parts.generator.sampled(inputs, sampling, mask)

    @torch.no_grad()
    def generate_requests(self, requests: Sequence[GenerationRequest]) -> list[list[Completion]]:
        """Returns the completions of each request of this data rank, in order. Collective.

        All requests run as one batch, each with its own options; other requests change a completion only by rounding.
        Communicates as :meth:`generate` with ``sampling``.

        Raises:
            EngineError: there is no request, a prompt is empty, or an accumulation is unfinished.
        """
        self._open_generation("generate_requests")
        with self._parts.evaluated():
            return self._parts.generator.complete(requests)

    def _open_generation(self, call: str) -> None:
        self._open(call)
        loop = self._parts.loop
        if loop is not None and loop.unfinished:
            raise EngineError(
                f"{call} was called inside an accumulation of {loop.unfinished} microbatch(es); call "
                "eng.step() first, or eng.zero_grad() to drop their gradients."
            )

    def serve(self, functions: Mapping[str, ServedFunction] | None = None, settings: ServeConfig | None = None) -> None:
        """Serves this engine to clients over HTTP until rank 0 gets SIGTERM or SIGINT. Collective.

        ``functions``: functions that clients may call by name. ``settings``: address, limits and folder for
        saved weights; None: the configured ones. Raises the same errors as :func:`engine.serve`.
        """
        # by its name, because the service is built of engines
        import_module("engine.serving.host.service").serve(self, functions, settings)

    # ------------------------------------------------------------------ state

    def register_for_checkpointing(self, **things: Any) -> None:
        """Adds objects with a ``state_dict`` to checkpoints, by name, such as ``data=sampler``. Each state must be a
        JSON value, equal on all ranks.
        """
        self._parts.resources.refuse_closed("register_for_checkpointing")
        self._parts.checkpoints.register(things)

    def save_checkpoint(
        self, folder: Path_ | None = None, client_state: Any = None, without_frozen: bool = False
    ) -> PendingSave:
        """Begins to write checkpoint ``folder/step-N``; returns once this rank's shards are in host memory. Collective.

        The folder appears once the checkpoint is complete. ``wait()`` on the result blocks until the save has ended,
        and raises if it failed. In the background, weights are sent over a separate gloo group to the ranks that write
        them.

        Args:
            folder: folder of the run; None: ``checkpoint.folder``, where only the newest ``checkpoint.keep`` are
                retained.
            client_state: any JSON value but a string; the value of rank 0 is saved, and ``load_checkpoint`` returns it.
            without_frozen: leave frozen parameters out; the same on all ranks.

        Raises:
            EngineError: ``client_state`` is a string. ``wait()`` raises problems of the save itself on all ranks, such
                as another engine that saves into the folder.
        """
        self._parts.resources.refuse_closed("save_checkpoint")
        self._note_unfinished("save_checkpoint")
        self._parts.comm.join(f"save_checkpoint{'(without_frozen=True)' * without_frozen}")
        return self._parts.checkpoints.save(folder, client_state if client_state is not None else {}, without_frozen)

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
        """Continues from the newest checkpoint of a run (or from ``.../step-N``), saved on any grid. Collective.

        Returns the checkpoint's client state. If it is a dict, iteration over it raises, so that DeepSpeed's unpacking
        into (path, state) fails. The hash of each file block read is checked.

        Args:
            folder: folder of the run, or of one checkpoint; None: ``checkpoint.folder``.
            load_module_only: load only weights and buffers.
            load_optimizer_states: False: load everything except the optimizer state.
            strict: False: parameters and buffers that the checkpoint lacks keep their values (the log names them), and
                parameters without saved optimizer state start with a fresh one.
            missing_ok: return None if the folder has no checkpoint.
            load_lr_scheduler_states: False: a torch scheduler restarts. The next update still uses the saved rate.

        Raises:
            CheckpointError: there is no checkpoint; it is damaged (names file, tensor and the last good checkpoint), or
                belongs to another model (names the first difference); ranks passed different folders. Raised on all
                ranks.
            EngineError: ``load_lr_scheduler_states`` is False, and no torch scheduler sets the rates.
        """
        self._parts.refuse_unfinished("load_checkpoint")
        self._parts.comm.join("load_checkpoint")
        options = LoadOptions(
            module_only=load_module_only, optimizer_states=load_optimizer_states, strict=strict,
            scheduler_states=load_lr_scheduler_states,
        )  # fmt: skip
        with self._parts.built.changing() if self._parts.built is not None else outside_inference_mode():
            return self._parts.checkpoints.load(folder, self._parts.update, options, missing_ok)

    def copy_weights_from(self, other: "Engine") -> None:
        """Copies parameters and persistent buffers from another engine on the same ranks, on any grid. Collective.

        Reads the other engine's fp32 masters, if it has any; the optimizer state of this engine does not change. Full
        tensors exist on a rank only in chunks of at most 256 MiB, each all-reduced over the world, label "weights".

        Raises:
            EngineError: the models differ, the engines have different numbers of ranks, or this engine has gradients of
                an unfinished accumulation.
        """
        self._parts.refuse_unfinished("copy_weights_from")
        other._parts.resources.refuse_closed("copy_weights_from")
        for eng in (self, other):
            if (gatherer := eng._parts.runtime.gatherer) is not None:
                gatherer.refuse_opened("copy_weights_from")
        self._parts.comm.join("copy_weights_from")
        with self._parts.runtime.changing(), other._parts.runtime.reading():
            self._parts.checkpoints.copy_weights(other._parts.checkpoints)

    def close(self) -> None:
        """Ends the engine: waits for a pending checkpoint, removes every patch from the model, closes logs and groups.

        The model's classes, attributes and hooks are then as before ``initialize``. Parameters stay in shards;
        parameters of other pipeline stages remain placeholders (NaN, without memory). A model in ZeRO shards can be
        passed to ``engine.deepspeed`` again; a model in tensor shards, expert shards or stages cannot be trained again.
        The process group itself lives until the interpreter exits.

        An engine that is dropped without ``close`` closes when Python collects it; a thread finishes a pending
        checkpoint.
        """
        try:
            self._parts.checkpoints.close()  # raises if a failed save stops the run
        finally:
            self._parts.resources.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------ around a step

    def _note_unfinished(self, call: str) -> None:
        if self._parts.loop is not None and self._parts.loop.unfinished and self._parts.grid.rank == 0:
            logger.warning(
                "%s inside an unfinished accumulation saves the state after update %d: the gradients of %d "
                "microbatch(es) are not saved; training continues with them.",
                call,
                self._parts.update.made,
                self._parts.loop.unfinished,
            )

    def add_callback(self, callback: Callable[[StepReport], object]) -> None:
        """Registers ``callback``, which every later training step on this rank calls with its report.

        An exception of ``callback`` reaches the caller of the step, after the update. A callback that communicates
        must be added on all ranks.
        """
        self._parts.reports.tell(callback)

    def _open(self, call: str) -> None:
        self._parts.resources.refuse_closed(call)
        if self._parts.built is None:
            raise EngineError(
                f"{call} was called before the model is placed on the grid, which needs a batch with labels; pass "
                "example_batch=... to engine.initialize, or train a batch first."
            )
        self._parts.comm.join(call)
