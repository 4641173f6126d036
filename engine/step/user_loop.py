"""Training loop in the user's code: forwards, backwards and steps in the order of its calls.

    output = eng(batch)                 a forward of the engine
    eng.backward(loss)                  or loss.backward(), or eng.scale(loss).backward(): any number of them
    eng.step()                          ends the microbatch, and after the last microbatch the step

A microbatch is the work between two calls of ``step``: its gradient is that of the sum of all its losses, as in torch.
With ``gradient_accumulation_steps`` above 1, a backward after a further forward begins a microbatch too, so that a loop
may also call ``step`` once, after all microbatches. The step averages over microbatches and data ranks.

The previous step predicts which backward is the last one, in which gradients are reduced as soon as they are complete.
If more backwards follow, all gradients are reduced again (``Backward.further``).
"""

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from engine.errors import EngineError
from engine.parallel.comm.traffic import Tally
from engine.parallel.model.forward_patch import PatchLayer
from engine.parallel.tensor.logits.sharded_logits import compute_lazy
from engine.program.batch import Batch
from engine.program.forward_inputs import batch_of_call
from engine.program.loss import WeightedLoss, check_pair, check_scalar, check_trainable, with_metrics
from engine.step.batch_check import check_batch
from engine.step.failed_ranks import note_failure
from engine.step.held_weights import ForwardDates, HeldWeights, WeightHolds
from engine.step.parts import StepPart
from engine.step.pipeline_call import PipelineCalls
from engine.step.runner import FinishedStep, StepRunner
from engine.step.runtime import RankRuntime
from engine.step.state import StepState
from engine.zero.optim.master_weights import gradient_norm
from engine.zero.reduce.reducer import Backward

_MANAGED_KEYS = 2**16
"""Forwards of one microbatch that draw different random numbers, where the user manages the accumulation."""


class LoopState(Enum):
    """Phase of the user's training loop between engine calls, such as a forward that still waits for its backward."""

    LEFT = auto()
    """No call has come since the engine's last ``train_batch``, load or save."""
    ENTERED = auto()
    """Forwards and backwards have run, and no forward waits for its backward; an accumulation may be unfinished."""
    FORWARDED = auto()
    """A forward that records gradients has run after the last backward."""
    RUNNING = auto()
    """A backward through the engine's parameters is running."""


@dataclass(slots=True)
class LoopControl:
    """Settings of the user's loop, which may be set before the model is sharded."""

    boundary: bool | None = None
    """True if the next ``step`` updates the weights; None: after ``gradient_accumulation_steps`` calls."""
    held: int = 0
    """Number of open ``no_sync`` blocks."""
    piped: bool = False
    """True if ``eng(batch)`` runs all stages of a pipeline (``open_pipeline``)."""
    rows: int | None = None
    """Rows of each microbatch that ``eng(batch)`` sends through a pipeline; None: one microbatch per call."""
    managed: bool = True
    """True if the engine counts microbatches to the next update; False: each ``step`` updates."""

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Opens a block in which backwards do not reduce gradients over ranks; see :meth:`engine.Engine.no_sync`."""
        self.held += 1
        try:
            yield
        finally:
            self.held -= 1


class UserLoop:
    """State of a training loop in which the user calls forward, backward and step, on this rank."""

    def __init__(self, runner: StepRunner, runtime: RankRuntime, control: LoopControl) -> None:
        self._control = control
        self._runner, self._runtime = runner, runtime
        self._accumulation = runtime.plan.config.accumulation
        self._step: StepState | None = None
        self._started: tuple[float, Tally] | None = None
        self._forwarded: Batch = None
        self.state = LoopState.LEFT
        self._forwards = 0
        """Forwards of this microbatch."""
        self._backwards = 0
        """Backwards of this step."""
        self._expected = self._accumulation
        """Backwards of the step before."""
        self._losses = 0
        """Backwards since the last call of ``step``."""
        self._pairs = False
        """True if these losses are pairs (sum, weight)."""
        self._was_last = False
        """The backward before was taken for the last one of the step."""
        self._counted: Tensor | None = None
        """Rows of experts in the forwards of this step; None: no forward yet, or they are not counted."""
        self._announced: Tensor | None = None
        """The loss of the backward that begins, if ``scale`` has seen it."""
        self._unscaled = False
        """Gradients of this step lack its loss scale."""
        self._issued = 0
        """Collectives before the forward or backward that runs."""
        self._continues = False
        """The last update was made by this loop, so a backward through the model itself is one of its next step."""
        self._calls = PipelineCalls(runtime) if runtime.pipeline is not None else None
        self._dates = ForwardDates(runner, self._calls)
        runtime.user_backward.serve(self._enter)
        runtime.gradient_guard.serve(self.zero_grad)

    # ------------------------------------------------------------------ the calls

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the model on one microbatch and returns its output; see :meth:`engine.Engine.__call__`."""
        self._recover()
        self._runtime.gradient_guard.lift()
        runtime, training = self._runtime, torch.is_grad_enabled()
        given = batch_of_call(runtime.program.model, args, kwargs)
        if self._step is None and self._started is None and training:
            self._started = time.perf_counter(), runtime.comm.tally.copy()
            for part in runtime.parts.having(StepPart.begin_step):
                part.begin_step()
            self._runner.remarks.look([given])
        key, before = self._random_key(), (self._forwards, self.state, self._forwarded)
        if training:  # an evaluation must not change what training draws
            self._forwards += 1
            self._forwarded = given
            if self.state is not LoopState.RUNNING:
                self.state = LoopState.FORWARDED
            if self._counted is None:
                self._counted = runtime.uncounted()
        moved = runtime.pipeline is not None and runtime.pipeline.traces.refresh()
        moved = check_batch([(args, kwargs)], None, runtime.comm, runtime.program.device, moved)
        self._issued = runtime.comm.issued + moved  # the ranks compare their paths, and fail alike there
        try:
            with runtime.counting(self._counted if training else None):
                output = self._run(args, kwargs, key, moved)
        except BaseException as error:  # as in torch, gradients of the microbatches before stay
            self._forwards, self.state, self._forwarded = before
            if runtime.communicates and (told := self._note_failure("eng(batch)", error)) is not None:
                raise told from error
            raise
        if training and self._calls is None:
            self._dates.note(output)
            if runtime.gatherer is not None:
                compute_lazy(output, unread=True)
        return output

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any], key: tuple[int, ...], moved: bool) -> Any:
        runtime = self._runtime
        if self._calls is not None:
            self._calls.compares_paths = moved
            return self._calls.forward(args, kwargs, key, self._control.rows)
        with runtime.forward(*key):
            call = partial(runtime.program.call, *args, **kwargs)
            return runtime.own(runtime.watched((args, kwargs), call))

    def backward(
        self, loss: Tensor | tuple[Tensor, Tensor | float], retain_graph: bool, metrics: Mapping[str, Any]
    ) -> None:
        """Runs the backward of a loss; see :meth:`engine.Engine.backward`."""
        self._recover()
        weighted = with_metrics(check_pair(loss), metrics, self._runtime.program.metrics)
        step = self._open_step()
        self._refuse_surplus(step)
        with self._dropping():
            check_trainable(weighted.sum)
            self._count(step, weighted, pair=isinstance(loss, tuple))
            with self._differentiating():
                torch.autograd.backward(step.root(weighted.sum), retain_graph=retain_graph)

    def scale(self, loss: Tensor) -> Tensor:
        """Returns the loss times the loss scale; see :meth:`engine.Engine.scale`."""
        self._recover()
        mean = check_scalar(loss, "the loss given to scale")
        check_trainable(mean)
        step = self._open_step()
        root = step.root(mean) if step.scale != 1.0 else mean.clone()
        with torch._C.DisableTorchFunctionSubclass():  # some subclasses refuse hooks; ours only observes
            root.register_hook(partial(self._announce, mean.detach()))  # type: ignore[no-untyped-call]
        return root

    def step(self, max_norm: float | None = None) -> FinishedStep | None:
        """Updates the weights if this ends an accumulation, else returns None; see :meth:`engine.Engine.step`."""
        self._recover()
        if (step := self._step) is None or not step.microbatches:
            raise EngineError("step() before backward(): there is no gradient to step with; call backward first.")
        self._refuse_unscaled(step)
        step.max_norm = step.max_norm if max_norm is None else max_norm
        self._losses = self._forwards = 0
        if not self._due(step):
            return None
        self._expected = self._backwards
        self._forget()
        self._continues = True
        self._dates.expire()
        return self._runner.finish(step)

    def zero_grad(self) -> None:
        """Drops the gradients of all microbatches since the last update; see :meth:`engine.Engine.zero_grad`."""
        self._recover()
        self._forget_gradients()
        self._runtime.reducer.reset()

    def guard_gradients(self, around: nn.Module | None = None) -> None:
        """Makes reads of parameters' ``grad`` raise, and the ``zero_grad`` of module ``around`` drop the engine's
        gradients; see :meth:`engine.Engine.guard_gradients`.
        """
        self._enter_loop()
        runtime = self._runtime
        if around is not None and "zero_grad" not in vars(around):
            give_back = runtime.gradient_guard.take_zero_grad(around)
            runtime.patches.own(around, PatchLayer.PARAMETERS, give_back, "its zero_grad drops the engine's gradients")
        runtime.gradient_guard.set()

    @property
    def at_boundary(self) -> bool:
        """True if the microbatch count makes ``step`` update after the running microbatch; False if not ``managed``."""
        return self._control.managed and self.unfinished + (not self._losses) >= self._accumulation

    @property
    def unfinished(self) -> int:
        """Number of microbatches with a backward since the last update."""
        return self._step.microbatches if self._step else 0

    def reduce_gradients(self) -> float:
        """Reduces the accumulated gradients over dp; returns the divisor that makes them an average. Collective.

        In an unfinished accumulation, the divisor assumes the mean loss weight for each microbatch still to come.

        Raises:
            EngineError: under fp16, a loss was not scaled.
        """
        self._recover()
        step, runtime = self._open_step(), self._runtime
        self._refuse_unscaled(step)
        if not step.reduced:
            runtime.finish()
            step.reduced = True
        weight = step.weight.clone()
        runtime.comm.all_reduce(weight, runtime.comm.grid.rows, "weight").wait()
        to_come = 1.0 if self._due(step) else self._accumulation / step.microbatches
        return float(weight) * step.divides * to_come

    def clip(self, max_norm: float) -> float:
        """Makes the next ``step`` clip to ``max_norm``; returns the L2 norm of the averaged gradient. Collective."""
        if not max_norm > 0:
            raise EngineError(
                f"clip_gradients was given max_norm {max_norm:g}, but max_norm must be above 0; pass math.inf to get "
                "the norm without clipping."
            )
        step, runtime = self._open_step(), self._runtime
        if not self._due(step):
            raise EngineError(
                f"clip_gradients was called inside an unfinished accumulation ({step.microbatches} of "
                f"{self._accumulation} microbatches): the norm needs all gradients; call it after the last backward."
            )
        divisor = self.reduce_gradients()
        squared = runtime.optimizer.gradient_squared_norm().to(step.loss.device)
        runtime.comm.all_reduce(squared, "world", "gradient norm").wait()
        step.max_norm = max_norm
        return gradient_norm(float(squared), divisor)

    def leave(self, call: str) -> None:
        """Ends the user's loop, and drops forwards without a backward. ``call``: name of the running engine method.

        Raises:
            EngineError: an accumulation is unfinished.
        """
        self._recover()
        if self.unfinished:
            raise EngineError(
                f"{call} was called inside an unfinished accumulation; call step() first, or zero_grad()."
            )
        self._forget()
        self._dates.expire()
        self.state = LoopState.LEFT

    def _enter_loop(self) -> None:
        if self.state is LoopState.LEFT:
            self.state = LoopState.ENTERED

    def hold_weights(self) -> HeldWeights:
        """Returns a handle to the present weights; see :meth:`engine.Engine.hold_weights`."""
        part = self._runtime.parts.find(WeightHolds)
        if part is None:
            part = WeightHolds(self._runtime.buckets, self._runtime.gatherer)
            self._runtime.parts.add(part)
        return part.hold(self._dates)

    # ------------------------------------------------------------------ a backward of the user's own

    def _announce(self, loss: Tensor, _: Tensor) -> None:
        if self.state is LoopState.RUNNING:
            if self._announced is None:
                raise EngineError(
                    "eng.backward(eng.scale(loss)) scales the loss twice; give eng.backward the loss itself, or call "
                    "backward() on the result of eng.scale."
                )
            self._announced += loss  # a root that sums several scaled losses
            if self._step is not None:
                self._step.loss += loss
            return
        self._announced = loss.clone()
        self._runtime.user_backward.start()

    def _enter(self) -> AbstractContextManager[None] | None:
        """Returns the context of a backward that has reached the parameters; None if it does not belong to this loop.

        It may go through a forward of the engine, or of the model itself, and may have begun in another engine.
        """
        if self.state is LoopState.RUNNING:
            return None
        self._enter_loop()
        if self._runtime.gatherer is not None and not any(map(_accumulates, self._runtime.parameters)):
            return self._runtime.gathering()  # torch.autograd.grad for something else than weights
        self._runtime.gradient_guard.lift()
        begun = self.state is LoopState.FORWARDED or self._losses or self._step or self._continues
        if not begun and self._runtime.gatherer is None:
            return None
        step, loss = self._open_step(), self._announced
        self._unscaled = self._unscaled or (step.scale != 1.0 and loss is None)
        self._refuse_surplus(step)
        unknown, step.unseen = step.loss.new_full((), math.nan), step.unseen or loss is None
        self._count(step, WeightedLoss(unknown if loss is None else loss, 1.0), pair=False)
        return self._differentiating_own()

    @contextmanager
    def _differentiating_own(self) -> Iterator[None]:
        with self._dropping(), self._differentiating():
            yield

    def _recover(self) -> None:
        """Enters the loop; drops the gradients of a step in which a backward of the user's own has raised."""
        self._enter_loop()
        if self._runtime.user_backward.abandon():
            self._runtime.comm.failures.refuse("a call after a backward that has raised")

    # ------------------------------------------------------------------ parts of a step

    def _open_step(self) -> StepState:
        if self._step is None:
            for part in self._runtime.parts.having(StepPart.refuse_own_loop):
                part.refuse_own_loop()
            self._step, self._started = self._runner.begin(self._started), None
            if self._counted is not None:
                self._step.experts = self._counted
        return self._step

    def _due(self, step: StepState) -> bool:
        boundary = self._control.boundary
        if boundary is None and not self._control.managed:
            return True
        return step.microbatches >= self._accumulation if boundary is None else boundary

    def _begins_microbatch(self) -> bool:
        return not self._losses or (self._accumulation > 1 and self.state is LoopState.FORWARDED)

    def _refuse_surplus(self, step: StepState) -> None:
        if step.max_norm is not None:
            raise EngineError(
                "backward was called after eng.clip_gradients() in the same step, so the norm does not include its "
                "gradient; clip after the last backward, and call step() before the next."
            )
        counts = self._control.managed and self._control.boundary is None
        surplus = counts and step.microbatches >= self._accumulation
        if self._begins_microbatch() and surplus:
            raise EngineError(
                f"backward was called for {step.microbatches + 1} microbatches, but gradient_accumulation_steps is "
                f"{self._accumulation}; call step() after microbatch {self._accumulation}, or, for longer steps, call "
                "eng.set_gradient_accumulation_boundary(False) at first and (True) before step()."
            )

    def _refuse_unscaled(self, step: StepState) -> None:
        """Refuses gradients of another scale here, and not in their backward, after which the user may drop them."""
        if self._unscaled:
            self._drop()
            raise EngineError(
                f"step() was called after a loss.backward() without the loss scale {step.scale:g}, but the update "
                "divides the gradients by this scale; call eng.scale(loss).backward() or eng.backward(loss), or "
                "eng.zero_grad() after a backward of another engine."
            )

    def _count(self, step: StepState, loss: WeightedLoss, pair: bool) -> None:
        """Adds a loss to the step: a mean is added to its microbatch, a pair to all sums and weights of the step."""
        first, forwarded = self._begins_microbatch(), self.state is LoopState.FORWARDED
        if self._losses and not first and (pair != self._pairs or (pair and not forwarded)):
            raise EngineError(
                "backward was called again in one microbatch, but the engine adds no other loss to a loss (sum, "
                "weight); call eng.backward once with (sum of all losses, weight), or give means only."
            )
        if not self._control.managed:
            if pair:
                raise EngineError(
                    "managed_gradient_accumulation is false and the loss is (sum, weight), but the sum of a step's "
                    "gradients is divided by gradient_accumulation_steps; give a mean, or leave "
                    "managed_gradient_accumulation out."
                )
            first_of_all = 0.0 if step.microbatches else float(self._accumulation)
            step.add(loss._replace(weight=first_of_all))
        else:
            step.add(loss if first or pair else WeightedLoss(loss.sum, 0.0))
        if first or forwarded:
            step.see(self._forwarded)
        if first:
            step.microbatches += 1
        if self._calls is not None:
            step.check_trace = self._calls.check_trace
        self._pairs = pair

    @contextmanager
    def _differentiating(self) -> Iterator[None]:
        """Opens a backward that is counted already."""
        self._backwards += 1
        self._losses += 1
        due = bool(self._control.boundary)
        if self._control.boundary is None and self._control.managed:
            due = self._backwards == self._expected
        if self._step is not None and self._step.reduced:  # somebody has read the gradients so far
            self._runtime.reducer.keep()
            self._step.reduced = self._was_last = False
        further, self._was_last = self._was_last, due and not self._control.held
        before, self.state = self.state, LoopState.RUNNING
        self._runtime.gradient_guard.lift()
        try:
            which = Backward(last=self._was_last, further=further)
            with self._calls.backward(which) if self._calls is not None else self._runtime.backward(which):
                yield
        finally:
            self.state, self._announced = before, None
        if self._accumulation > 1:
            self._forwards = 0  # the next forward begins a microbatch
        self.state = LoopState.ENTERED
        self._runtime.gradient_guard.set()

    @contextmanager
    def _dropping(self) -> Iterator[None]:
        self._issued = self._runtime.comm.issued
        try:
            yield
        except BaseException as error:
            self._drop()
            if (told := self._note_failure("backward", error)) is not None:
                raise told from error
            raise

    def _note_failure(self, call: str, error: BaseException) -> EngineError | None:
        """Notes a failure, see :func:`note_failure`; stages that have begun to send never fail equally."""
        comm = self._runtime.comm
        return note_failure(call, error, comm, alike=self._calls is None or comm.issued <= self._issued)

    def _drop(self) -> None:
        """Forgets the gradients of the unfinished step."""
        self._forget()
        self._runtime.reducer.reset()

    def _forget(self) -> None:
        """Forgets the unfinished step, and forwards without a backward."""
        self._forget_gradients()
        self._started = self._counted = None
        self.state, self._continues, self._forwards = LoopState.ENTERED, False, 0

    def _forget_gradients(self) -> None:
        self._runtime.gradient_guard.lift()
        self._step = None
        if self.state is not LoopState.FORWARDED:  # else its backward is one of the next step
            self._counted = None
        self._unscaled = self._was_last = False
        self._backwards = self._losses = 0

    def _random_key(self) -> tuple[int, ...]:
        """Returns (seed, step, global microbatch), and the number of the forward if the microbatch has several."""
        index = self.unfinished
        if self._losses and self._accumulation == 1:
            index -= 1  # this microbatch has begun already
        key = self._runner.random_key(index % self._accumulation)
        further = self._forwards + index // self._accumulation * _MANAGED_KEYS
        # negative, because positive numbers count finished modules
        return (*key, -further) if further else key


def _accumulates(parameter: Tensor) -> bool:
    """Returns True if the running backward adds to the gradient of ``parameter``."""
    with torch._C.DisableTorchFunctionSubclass():
        node = torch.autograd.graph.get_gradient_edge(parameter).node
    return bool(torch._C._will_engine_execute_node(node))
