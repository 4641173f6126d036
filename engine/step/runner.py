"""One step of an engine, from the batch to the update or the decision to skip it.

train        batch -> microbatches -> same on all ranks of a replica? -> trace (pipelines)
                 -> executor [ forwards, backwards + gradient reduction ] -> update + parameter gather
evaluate     the same without backwards and update
loop         the same parts in the order of the user's calls, see :class:`engine.step.user_loop.UserLoop`

An error waits until all ranks can learn of it, see :meth:`StepRunner._run_schedule`.

Rank 0 logs each of these likely mistakes of a script once:

the model is in eval mode        dropout is off, running statistics do not change
every step has the same batch    a new iterator in each call returns its first batch again
"""

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from engine.errors import EngineError
from engine.parallel.comm.failed_calls import has_lost_ranks
from engine.parallel.comm.traffic import Tally
from engine.parallel.pipeline.runtime.executor import RankSchedule, rank_schedule
from engine.parallel.pipeline.runtime.outputs import Carrier
from engine.program.batch import Batch, is_text, join_outputs, named_tensors
from engine.program.program import evaluating
from engine.step.batch_check import check_paths, differing_buffer, glimpse, small_digest, take_batch
from engine.step.counts import StepCount, StepCounts
from engine.step.failed_ranks import OtherRankError, note_failure, problem_of_any
from engine.step.microbatches import MicrobatchRunner, StepKind
from engine.step.parts import Rerun, StepPart
from engine.step.rank_parts import WrittenBuffers
from engine.step.runtime import RankRuntime
from engine.step.state import RunControl, StepState
from engine.step.update import Update, UpdateOutcome
from engine.zero.flat_buckets import Attachment

_ALIKE = 8
"""So many equal batches in a row are no chance, and more than the passes over one batch of most algorithms."""
_EVERY = 32
"""After the start, a batch of so many steps is glanced at, and the next one: a few kilobytes that lie on the host."""


class Remarks:
    """Log warnings about likely mistakes of the training script: training in eval mode, or a repeated batch."""

    def __init__(self, model: nn.Module, speaks: bool) -> None:
        self._model, self._speaks = model, speaks
        self._training: bool | None = None
        """The mode in which the model was last looked at."""
        self._modes_told = False
        self._digest = 0
        self._alike: int | None = 0
        """Steps in a row with one batch; None: batches differ, and are compared at the next glance."""
        self._steps = 0
        self._glimpse: int | None = None
        self._batches_told = False

    def look(self, microbatches: Sequence[Batch]) -> None:
        """Logs a warning if the model trains in eval mode, or if 8 steps in a row receive the same batch.

        ``microbatches``: all microbatches of the step on this rank, or only the first one.
        """
        if not self._speaks:
            return
        if not self._modes_told and self._model.training is not self._training:
            self._look_at_modes()
        self._steps += 1
        if self._alike is not None:
            self._look_at_batch(microbatches)
        elif self._steps % _EVERY < 2 and not self._batches_told:
            self._glance(microbatches)

    def _look_at_modes(self) -> None:
        self._training, idle = self._model.training, list(idle_in_eval_mode(self._model))
        self._modes_told = bool(idle)
        if idle:
            logger.warning(
                "the model trains in eval mode, so %s%s does nothing; call model.train() before the step "
                "(from_pretrained returns a model in eval mode), or set its rate to 0 if it is to do nothing.",
                idle[0],
                f" and {len(idle) - 1} more" * (len(idle) > 1),
            )

    def _glance(self, microbatches: Sequence[Batch]) -> None:
        before, self._glimpse = self._glimpse, glimpse(microbatches[0])
        if self._steps % _EVERY and self._glimpse is not None and self._glimpse == before:
            self._alike = self._digest = 0
            self._look_at_batch(microbatches)

    def _look_at_batch(self, microbatches: Sequence[Batch]) -> None:
        digest = small_digest(microbatches) if any(True for part in microbatches for _ in named_tensors(part)) else 0
        self._digest = self._digest or digest
        self._alike = self._alike + 1 if digest and digest == self._digest and self._alike is not None else None
        if self._alike == _ALIKE:
            self._alike, self._batches_told = None, True
            logger.warning(
                "%d steps in a row were given the same batch; if the data has more, make the iterator once: batches = "
                "iter(loader), then train_batch(batches) or train_batch(next(batches)).",
                _ALIKE,
            )


def idle_in_eval_mode(model: nn.Module) -> Iterator[str]:
    """Yields a phrase, such as "dropout (encoder.drop)", for each effect that eval mode turns off.

    Effects are dropout with a nonzero rate, and updates of running statistics. Skips a module if its parent is in
    training mode, or has no trainable parameters.
    """
    modules = dict(model.named_modules())
    for path, module in modules.items():
        outer = modules[path.rpartition(".")[0]]
        if module.training or outer.training or not any(p.requires_grad for p in outer.parameters()):
            continue
        if isinstance(module, _DropoutNd):
            if module.p > 0:
                yield f"dropout ({path})"
        elif module._buffers.get("running_mean") is not None:
            yield f"the update of running statistics ({path})"
        else:
            rates = (name for name, value in vars(module).items() if "drop" in name.lower() and _is_rate(value))
            yield from (f"dropout ({path}.{name})" for name in rates)


def _is_rate(value: object) -> bool:
    return isinstance(value, float) and 0.0 < value < 1.0


logger = logging.getLogger("trine")
_CALLS: dict[StepKind, str] = {
    "train": "train_batch", "evaluate": "eval_batch", "output": "eval_batch", "predict": "predict",
}  # fmt: skip
_NO_BATCH = 2**40
"""In place of a number of microbatches: this data rank has a bad batch."""
_COMPARED_STEPS = 2  # one batch may be alike by chance, and a digest costs the host a look at every row


class FinishedStep(NamedTuple):
    """State and outcome of a training step or evaluation that all ranks have finished."""

    state: StepState
    outcome: UpdateOutcome


class StepRunner:
    """Runner of training steps, evaluations and predictions on this rank."""

    def __init__(self, model: nn.Module, runtime: RankRuntime, update: Update, control: RunControl) -> None:
        self._model, self._runtime, self._update, self._control = model, runtime, update, control
        self._config, self._comm, self._device = runtime.plan.config, runtime.comm, runtime.program.device
        plan = runtime.plan
        self._counts = StepCounts(plan, runtime.comm, self._device)
        usual, self._given = self._config.accumulation, self._config.given_microbatches
        self._usual = {trains: self._counts.row(usual, trains) for trains in (True, False)}
        """Actions of this rank in a training step and in an evaluation of the usual number of microbatches."""
        self._trains = any(row.trainable for row in plan.table)
        self._attachment = Attachment(model, (*runtime.buckets, *runtime.frozen))
        self._finished = 0
        """Training steps that were finished."""
        self._compared = 0
        """Steps in which the batches of the data ranks were compared."""
        self._told = False
        """True once the parts of a batch that forward does not receive were reported."""
        self.remarks = Remarks(model, speaks=self._comm.grid.rank == 0)

    @property
    def made(self) -> int:
        """Number of weight updates so far."""
        return self._update.made

    def train(self, batch: Batch | Iterator[Batch]) -> FinishedStep:
        """Runs one training step; see :meth:`engine.Engine.train_batch`."""
        if not self._trains:
            if self._config.optimizer is None:
                raise EngineError(
                    "train_batch was called on an engine without an optimizer, which can only evaluate; name one in "
                    "the config, or pass optimizer=... to engine.initialize."
                )
            raise EngineError(
                "train_batch was called, but the model has no trainable parameter; set requires_grad on the "
                "parameters to train before engine.initialize, or call eval_batch or predict."
            )
        step, microbatches = self._open(batch, "train")
        row = self._row(microbatches)
        reruns = [part.rerun() for part in self._runtime.parts.having(StepPart.rerun)]
        if (compared := next(filter(None, reruns), None)) is not None:
            self._run_twice(step, microbatches, compared, row)
        else:
            self._run_schedule(step, microbatches, row)
        return self.finish(step)

    def _run_twice(self, step: StepState, microbatches: MicrobatchRunner, computed: Rerun, row: RankSchedule) -> None:
        """Runs forwards and backwards twice from the same state; the update uses the result of the second run.

        A rank with a problem joins the second run's reductions only. ``sent`` gets the traffic of the second run, which
        the step leaves out.
        """
        runtime, again = self._runtime, step.again()
        second = microbatches.again(again)
        runtime.reducer.observe(computed.see)
        try:
            self._run_schedule(step, microbatches, row)
            runtime.finish()
            computed.end(step.loss)
            self._begin_again()
            before = self._comm.tally.copy()
            if step.problem is None:
                self._run_schedule(again, second, row)
            runtime.finish()
            computed.end(again.loss)
        finally:
            runtime.reducer.observe(None)
        for traffic in self._comm.tally.since(before).rows():
            step.sent.add(traffic)
        step.problem, step.reduced = step.problem or again.problem, True

    def _begin_again(self) -> None:
        """Restores the state that forwards have changed, for a second run."""
        if (buffers := self._runtime.parts.find(WrittenBuffers)) is not None:
            buffers.undo_step()
            buffers.begin_step()

    @torch.no_grad()
    def evaluate(self, batch: Batch | Iterator[Batch], kind: StepKind) -> FinishedStep:
        """Computes the loss of one batch and, for the ``kind`` "output", its outputs; see
        :meth:`engine.Engine.eval_batch`.
        """
        with evaluating(self._model):
            step, microbatches = self._open(batch, kind)
            self._run_schedule(step, microbatches, self._row(microbatches))
        with self._agreeing("eval_batch", step):
            totals = self._update.agree(step, self._runtime.plan.last_rank)
        step.seconds = time.perf_counter() - step.started
        lr = self._runtime.learning_rate.at(self._update.made)
        return FinishedStep(step, UpdateOutcome(totals=totals, norm=math.nan, lr=lr, scale=1.0, nonfinite=None))

    @torch.no_grad()
    def predict(self, batch: Batch, micro: int | None = None, together: bool = False) -> Any:
        """Returns the model's output for one batch; see :meth:`engine.Engine.predict`.

        ``micro``: rows of a microbatch; None: as configured. ``together``: True to run as many forwards as the
        data rank with the most microbatches. Then all data ranks must call; a rank without rows, :meth:`accompany`.
        """
        step, split = self.begin(), self._runtime.program.rows.split
        with evaluating(self._model):
            taken = self._take(partial(split, batch, micro or self._config.micro), step)
        together = together or self._runtime.data_ranks_meet
        count = self._most_forwards(len(taken), step) if together else len(taken)
        return join_outputs(self._outputs(step, taken, count))

    @torch.no_grad()
    def accompany(self, batch: Batch) -> bool:
        """Takes part in the collectives of other data ranks' ``predict`` call, on a data rank without rows.

        Runs forwards with ``batch``, any filler rows, and drops their outputs; then returns True. If no data rank has
        rows, returns False without a forward.
        """
        step = self.begin()
        count = self._most_forwards(0, step)
        if count:
            if (pipeline := self._runtime.pipeline) is not None:
                with evaluating(self._model):
                    pipeline.traces.refresh()
            self._outputs(step, self._runtime.program.rows.split(batch, self._config.micro)[:1], count)
        return count > 0

    def _outputs(self, step: StepState, taken: list[Batch], count: int) -> list[Any]:
        """Returns the outputs for the microbatches ``taken``, from ``count`` forwards. Collective over the world."""
        runtime, comm = self._runtime, self._comm
        microbatches = [*taken, *taken[-1:] * (count - len(taken))]
        row = rank_schedule(runtime.plan.forwards(max(count, 1)), comm.grid.coord().pp)
        with evaluating(self._model):
            self._run_schedule(step, MicrobatchRunner(runtime, step, microbatches, self.random_key, "predict"), row)
        with self._agreeing("predict", step):
            self._update.agree(step, runtime.plan.last_rank)
        return step.outputs[: len(taken)]

    # ------------------------------------------------------------------ parts of a step

    def begin(self, started: tuple[float, Tally] | None = None) -> StepState:
        """Returns the state of a new step with zero sums.

        ``started``: time of its start by ``time.perf_counter``, and the traffic until then; None: now.
        """
        now, sent = (time.perf_counter(), self._comm.tally.copy()) if started is None else started
        self._attachment.check()
        if torch.is_grad_enabled():
            self._update.used_factor = None
        self._control.refuse_spoiled()
        zero = torch.zeros((), dtype=torch.float64, device=self._device)
        return StepState(
            started=now,
            sent=sent,
            loss=zero,
            weight=zero.clone(),
            scale=self._update.scale.value,
            added_ranks=self._config.row_ranks if self._config.gradient_allreduce_op == "sum" else 1,
            experts=self._runtime.uncounted(),
        )

    def _open(self, batch: Batch | Iterator[Batch], kind: StepKind) -> tuple[StepState, MicrobatchRunner]:
        """Starts a step; a bad batch becomes the problem of the step, so that the other ranks do not wait for this
        one."""
        step = self.begin()
        if torch.is_grad_enabled():
            for part in self._runtime.parts.having(StepPart.begin_step):
                part.begin_step()
        rows, config = self._runtime.program.rows, self._config
        take = partial(rows.take_microbatches, batch, config.micro, self._given)
        taken = self._take(take, step)
        count = self._count(taken, step)
        step.rows = count.rows
        if (
            kind == "train"
            and self._compared < _COMPARED_STEPS
            and self._comm.grid.row_ranks > 1
            and step.problem is None
        ):
            step.digest, self._compared = small_digest(taken), self._compared + 1
        if taken and step.problem is None:
            if kind == "train":
                self.remarks.look(taken)
            if not self._told:
                step.problem = self._tell(taken[0])
            step.text = is_text(taken[0])  # on every rank, also on those without the loss
        key = partial(self.random_key, first=count.first)
        return step, MicrobatchRunner(self._runtime, step, taken, key, kind, count.scheduled)

    def _row(self, microbatches: MicrobatchRunner) -> RankSchedule:
        """Returns the actions of a step on this rank; of an evaluation, forwards only."""
        trains = microbatches.kind == "train"
        return self._usual[trains] if self._given else self._counts.row(microbatches.scheduled, trains)

    def _count(self, taken: Sequence[Batch], step: StepState) -> StepCount:
        """Returns the numbers of microbatches of a step; data ranks agree on them if they may differ."""
        if self._config.uneven_microbatches:
            rows = sum(map(self._runtime.program.rows.count, taken))
            try:
                return self._counts.agree(len(taken), rows, step.problem)
            except EngineError as problem:
                step.problem = step.problem or problem
        return StepCount(self._config.accumulation, self._first, self._config.train_batch_size or 0)

    def _take(self, take: Callable[[], list[Batch]], step: StepState) -> list[Batch]:
        """Returns the microbatches of a step, checked on all ranks of the replica; notes a problem with them in the
        step."""
        pipeline = self._runtime.pipeline
        moved = pipeline is not None and pipeline.traces.refresh()

        def checked() -> list[Batch]:
            taken = take()
            for part in self._runtime.parts.having(StepPart.taken):
                part.taken(taken)
            return taken

        taken, step.problem, step.compares_paths = take_batch(checked, self._comm, self._device, moved)
        return taken

    def _most_forwards(self, own: int, step: StepState) -> int:
        """Returns the largest number of forwards of any data rank, which all ranks run; 8 bytes over dp."""
        most = torch.tensor([own if step.problem is None else _NO_BATCH], device=self._device)
        self._comm.all_reduce(most, self._comm.grid.rows, "predict", "max").wait()
        if int(most) < _NO_BATCH:
            return int(most)
        step.problem = step.problem or OtherRankError(
            "predict: another data rank was given a bad batch; see the error of the rank that failed."
        )
        return own

    def _tell(self, microbatch: Batch) -> Exception | None:
        """Logs the parts of a batch that forward does not receive; returns an error, equal on all ranks, if these are
        unknown."""
        try:
            note = self._runtime.program.inputs.note(microbatch)
        except Exception as problem:  # a function of the user may raise anything
            return problem
        self._told = True
        if note and self._comm.grid.rank == 0:
            logger.info(note)
        return None

    def _run_schedule(self, step: StepState, microbatches: MicrobatchRunner, row: RankSchedule) -> None:
        """Traces all microbatches, then runs them; an error is stored in ``step`` if all ranks can reach the control
        sum.

        A failure while tracing is kept: tracing sends nothing, and the whole replica traces the same batch; where
        parameters are gathered, data ranks tell each other. A failure while running is raised at once if other ranks
        wait for messages of this one, else it is kept.
        """
        runtime = self._runtime
        carrier = Carrier(self._comm, self._device, runtime.plan.last_rank, everywhere=microbatches.kind == "predict")
        try:
            if runtime.gatherer is not None:
                runtime.gatherer.refuse_opened("a step")
            if step.problem is None:
                microbatches.trace_all()
        except Exception as problem:
            step.problem = problem
        if step.compares_paths:
            self._compare_paths(step, microbatches)
        if runtime.data_ranks_meet:
            step.problem = problem_of_any(step.problem, self._comm, self._device, runtime.gatherer is not None)
        if microbatches.kind == "train":
            runtime.reducer.expect(microbatches.scheduled)
        if step.problem is not None:
            return  # no action runs on any rank of the replica, so none waits; the control sum tells the other replicas
        try:
            with runtime.running(), runtime.passes(row):
                runtime.executor.run(row, microbatches)
                microbatches.bring_outputs(carrier)
        except BaseException as problem:
            # Pipeline and tensor ranks, or data ranks in a gather, already wait for communication that this rank will
            # not reach; they cannot come to the control sum. Only plain data parallelism can keep the problem.
            if not runtime.communicates and isinstance(problem, (Exception, KeyboardInterrupt)):
                step.problem = problem
                return
            if microbatches.kind == "train":
                runtime.forget_step()
            call, alike = _CALLS[microbatches.kind], runtime.pipeline is None
            if (told := note_failure(call, problem, self._comm, alike)) is not None:
                raise told from problem
            raise

    def _compare_paths(self, step: StepState, microbatches: MicrobatchRunner) -> None:
        try:
            paths = [traced.digest for traced in microbatches.traced]
            check_paths(paths, step.problem, self._comm, self._device)
        except EngineError as problem:
            step.problem = problem
        if step.problem is None and self._runtime.pipeline is not None:
            self._runtime.pipeline.traces.agree()

    @contextmanager
    def _agreeing(self, call: str, step: StepState) -> Iterator[None]:
        """Opens the agreement of all ranks on a step; an error that all ranks raise in it leaves the engine usable."""
        try:
            yield
        except BaseException as error:
            spoils = error is not step.problem and (has_lost_ranks(error) or not isinstance(error, Exception))
            if spoils and (told := note_failure(call, error, self._comm, alike=False)) is not None:
                raise told from error
            raise

    def finish(self, step: StepState) -> FinishedStep:
        """Sums the step's loss, tokens and flags over the world, then makes or skips the update. Collective.

        If any rank has failed, all ranks raise and restore the module buffers that the step has written.
        """
        step.problem = step.problem or self._control.take_problem() or self._problem_of_forward()
        with self._agreeing("an update", step), self._runtime.parts.undoing_failures():
            finished = FinishedStep(step, self._update.run(step, self._runtime, stops=self._control.stops))
        for part in self._runtime.parts.having(StepPart.end_step):
            part.end_step(step, self._update.made, finished.outcome.skipped)
        self._finished += 1
        if self._finished == _COMPARED_STEPS:
            self._compare_buffers()
        return finished

    def _problem_of_forward(self) -> EngineError | None:
        """Returns an error if the first forward has taken a parameter from the engine, before any update."""
        if not self._finished:
            try:
                self._attachment.check()
            except EngineError as problem:
                return problem
        return None

    def _compare_buffers(self) -> None:
        name = differing_buffer(self._model, self._comm, self._device)
        if name is not None and self._comm.grid.is_first("stage"):
            logger.warning(
                "buffer %r differs between data ranks, since each writes it from its own rows; evaluation uses each "
                "rank's own and checkpoints keep that of data rank 0: average it over data ranks before you evaluate "
                "or save, or use a layer without running statistics (GroupNorm, LayerNorm).",
                name,
            )

    def random_key(self, index: int, first: int | None = None) -> tuple[int, int, int]:
        """Returns the random seed of this rank's microbatch ``index``: (configured seed, updates so far, global index).

        A microbatch has the same seed on every grid. ``first``: global index of this rank's first microbatch; None if
        all data ranks have the same number of microbatches.
        """
        return self._config.seed, self._update.made, (self._first if first is None else first) + index

    @property
    def _first(self) -> int:
        """Global index of this rank's first microbatch, where all data ranks have equally many."""
        return self._comm.grid.row_rank * self._config.accumulation
