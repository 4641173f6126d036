"""Training loop in the user's own code, with the calls of the engine: forward, backward, step.

for batch in loader:                # gradient_accumulation_steps: 1          # 4: an update every fourth step()
    loss = eng(batch).loss
    eng.backward(loss)              # or loss.backward(), or eng.scale(loss).backward()
    eng.step()
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn

from engine.engine_parts import EngineParts
from engine.errors import EngineError
from engine.program.forward_inputs import batch_of_call
from engine.program.program import outside_inference_mode
from engine.reporting.step_report import StepReport
from engine.step.held_weights import HeldWeights
from engine.step.user_loop import UserLoop


class TrainingLoop:
    """Engine methods for a training loop in the user's code: forward (``eng(batch)``), ``backward``, ``step`` and
    others.

    With pipeline parallelism, forward, ``backward`` and ``step`` raise until ``open_pipeline`` is called.
    """

    _parts: EngineParts

    def open_pipeline(self, rows: int | None = None) -> None:
        """Makes later calls ``eng(batch)`` run all pipeline stages and return the output on every rank. Call it on all
        ranks.

        A loop may then compute the loss itself and call ``backward(loss)``. The activations of a forward are stored
        until its backward, as in GPipe. The last stage sends outputs to the other stages over pp, label "outputs";
        ``plan`` does not count these bytes.

        Args:
            rows: a batch is divided into parts of this many rows to fill the pipeline; outputs are joined. None: one
                part.
        """
        self._parts.resources.refuse_closed("open_pipeline")
        self._parts.control.piped, self._parts.control.rows = True, rows

    @outside_inference_mode()
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the forward of one microbatch: ``eng(batch)``, or ``eng(*args, **kwargs)`` as the model takes them.

        Raises:
            EngineError: there is a pipeline, whose stages do not have the output; with ``open_pipeline``, an argument
                that requires a gradient, or parts with outputs that are not rows.
        """
        self._refuse_pipeline("eng(batch)")
        self._parts.complete(batch_of_call(self._parts.model, args, kwargs))
        assert self._parts.loop is not None
        with self._parts.noting_call():
            return self._parts.loop.forward(args, kwargs)

    def backward(
        self,
        loss: Tensor | tuple[Tensor, Tensor | float],
        retain_graph: bool = False,
        metrics: Mapping[str, Any] | None = None,
    ) -> None:
        """Runs the backward of the loss of one microbatch.

        A microbatch may have several losses: call it once for each. If ``gradient_accumulation_steps`` > 1, the first
        call after a forward begins the next microbatch.

        Averages the gradient over the microbatches of the step and over data ranks; a loss (sum, weight) is divided by
        the total weight of all losses in the step. Gradients are reduced over dp during the last backward.
        ``loss.backward()`` has the same effect, but the loss of the step's report is nan, and fp16 needs ``scale``.

        Args:
            loss: a 0-dim mean, or (sum, weight); it may depend on several forwards, and on several engines.
            retain_graph: True to allow another backward through the same graph.
            metrics: name -> value for the step's report, with names from ``monitor.metrics``; a value is a number, a
                0-dim tensor or (sum, weight).

        Raises:
            EngineError: backwards of more microbatches than ``gradient_accumulation_steps``; a loss that is not a
                scalar; on a pipeline without ``open_pipeline``.
        """
        loop = self._looped("backward(loss)")
        with self._parts.noting_call():
            loop.backward(loss, retain_graph, metrics or {})

    def hold_weights(self) -> HeldWeights:
        """Returns a handle to the present weights, for a backward that runs after later updates.

            output, weights = eng(batch), eng.hold_weights()
            ...                            # updates
            with weights.restored():
                eng.backward(loss(output))

        Call it after the forward and before the next update. Inside ``restored()`` the model has these weights again.
        The first update after the call copies this rank's weights; the copy is freed once no handle refers to it.

        Raises:
            EngineError: the model is not placed yet, or is on a pipeline without ``open_pipeline``.
        """
        return self._looped("hold_weights()").hold_weights()

    def scale(self, loss: Tensor) -> Tensor:
        """Returns the 0-dim ``loss`` times the loss scale (1 except under fp16), for ``eng.scale(loss).backward()``.

        Raises:
            EngineError: the loss is not a scalar, or depends on no parameter; the model is on a pipeline.
        """
        if (stages := self._parts.config.pp) > 1 and self._parts.control.piped:
            raise EngineError(
                f"scale(loss) was called with parallel.pipeline {stages}: loss.backward() ends at the outputs and "
                "does not reach the stages that computed them; call eng.backward(loss)."
            )
        return self._looped("scale(loss)").scale(loss)

    def clip_gradients(self, max_norm: float) -> float:
        """Makes the next ``step`` clip the averaged gradient to the L2 norm ``max_norm``; returns the norm before
        clipping.

        Call it after the last backward of a step. Collective: reduces outstanding gradients and loss weights over dp,
        and the squared norms over the world (8 bytes).

        Raises:
            EngineError: ``max_norm`` is not above 0; the accumulation is unfinished; the model is on a pipeline without
                ``open_pipeline``.
        """
        loop = self._looped("clip_gradients")
        with self._parts.noting_call():
            return loop.clip(max_norm)

    def step(self, max_norm: float | None = None) -> StepReport | None:
        """Updates the weights if the accumulation is complete, and returns the step's report; otherwise returns None.

        An update is collective.

        Args:
            max_norm: L2 norm to which this step clips the averaged gradient, equal on all ranks; 0: no clipping. None:
                the configured ``gradient_clipping``.

        Raises:
            EngineError: no backward was called in this step; under fp16, a loss was not scaled; a negative
                ``max_norm``.
        """
        self._parts.resources.refuse_closed("step()")
        if max_norm is not None and not max_norm >= 0:
            raise EngineError(f"step was given max_norm {max_norm:g}, a negative norm; give 0 for no clipping.")
        if self._parts.loop is None:
            raise EngineError("step() before backward(): there is no gradient to step with; call backward first.")
        with self._parts.noting_call():
            finished = self._parts.loop.step(max_norm)
        return None if finished is None else self._parts.report(finished)

    def zero_grad(self) -> None:
        """Drops all gradients since the last update, so that the accumulation starts anew. Call it on all ranks."""
        self._parts.resources.refuse_closed("zero_grad()")
        if self._parts.loop is not None:
            self._parts.loop.zero_grad()

    def gather_rows(self, rows: Tensor) -> Tensor:
        """Returns the rows of all data ranks as one tensor [data ranks * b, ...], in rank order. Collective.

        It is for losses that compare rows with each other (CLIP, SigLIP); the backward sends each rank the exact
        gradient of its rows. A ``loss_fn`` with an argument ``gather_rows`` receives this function, on pipelines too.

        Each microbatch costs one all-gather over dp in forward and a reduce-scatter in backward, label "gathered rows".
        ``plan`` does not count these bytes.

        Args:
            rows: this rank's rows [b, ...], with the same shape on all data ranks.

        Raises:
            EngineError: the argument is not a tensor with rows.
        """
        self._parts.resources.refuse_closed("gather_rows")
        return self._parts.runtime.program.gather(rows)

    def guard_gradients(self, around: nn.Module | None = None) -> None:
        """Makes reads of a parameter's ``grad`` raise an error. The next forward, update or ``zero_grad`` ends this.

        Such a read would find None, because the engine has taken the gradient. The engine itself calls this after each
        backward. Call it after ``step`` if user hooks may read gradients between the update and the next forward.

        Args:
            around: a framework's module that contains the model; its ``zero_grad`` is patched to drop the engine's
                gradients too.
        """
        if self._parts.loop is not None:
            self._parts.loop.guard_gradients(around)

    def no_sync(self) -> AbstractContextManager[None]:
        """Returns a context in which backwards do not reduce gradients over data ranks. ``step`` reduces them later.

        The results are the same. With ``reduce: microbatch``, ZeRO 2 and 3 reduce in every backward, also in this
        context.
        """
        self._refuse_pipeline("no_sync()")
        return self._parts.control.no_sync()

    def set_gradient_accumulation_boundary(self, boundary: bool | None) -> None:
        """Makes all later calls of ``step`` update the weights (True), or none of them (False).

        None restores the default: every ``gradient_accumulation_steps``-th call updates. An update averages the
        gradient over all microbatches since the last update.

        With ``managed_gradient_accumulation: false``, every call updates by default, and the gradients' sum is divided
        by ``gradient_accumulation_steps``.
        """
        self._refuse_pipeline("set_gradient_accumulation_boundary")
        self._parts.control.boundary = boundary

    def is_gradient_accumulation_boundary(self) -> bool:
        """Returns True if ``step`` after the running microbatch will update the weights.

        With ``managed_gradient_accumulation: false``, every ``step`` updates, but the result is False unless
        ``set_gradient_accumulation_boundary(True)`` was called.
        """
        self._refuse_pipeline("is_gradient_accumulation_boundary")
        if self._parts.control.boundary is not None:
            return self._parts.control.boundary
        if self._parts.loop is not None:
            return self._parts.loop.at_boundary
        return self._parts.control.managed and self._parts.config.accumulation == 1

    def _looped(self, call: str) -> UserLoop:
        self._refuse_pipeline(call)
        if self._parts.loop is None:
            raise EngineError(f"{call} before eng(batch): there is no forward to differentiate; call eng(batch) first.")
        return self._parts.loop

    def _refuse_pipeline(self, call: str) -> None:
        self._parts.resources.refuse_closed(call)
        if self._parts.config.pp > 1 and not self._parts.control.piped:
            raise EngineError(
                f"{call} with parallel.pipeline {self._parts.config.pp}: forwards and backwards of all stages are one "
                "schedule, and no single stage has the output; call train_batch(batch) or eval_batch(batch), or, for "
                "your own loop, eng.open_pipeline() first (under engine.deepspeed: model_engine.train_batch(data_iter) "
                "or model_engine.eval_batch(data_iter), or model_engine.engine.open_pipeline() first)."
            )
