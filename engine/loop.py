"""The loop that a user writes himself, in the calls of the engine: forward, backward, step.

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
from engine.reporting.step_report import StepReport
from engine.step.user_loop import UserLoop


class TrainingLoop:
    """The calls of the engine for a loop of the user's own.

    A pipeline, whose stages run one schedule, refuses them, unless ``open_pipeline`` was called.
    """

    _parts: EngineParts

    def open_pipeline(self, rows: int | None = None) -> None:
        """From now on ``eng(batch)`` runs all stages of a pipeline and gives its output to every rank. Collective.

        A loop may then compute the loss itself and call ``backward(loss)``. Each forward waits for its backward, so all
        its activations are live, as in GPipe, and each of p stages idles for (p-1)/(m+p-1) of the time of a forward in
        m parts. Outputs go from the last stage to the p-1 others, label "outputs"; ``plan`` counts a ``train_batch``,
        which sends none.

        Args:
            rows: a batch goes through the stages in parts of so many rows, whose outputs are joined; None: as one.
        """
        self._parts.resources.refuse_closed("open_pipeline")
        self._parts.control.piped, self._parts.control.rows = True, rows

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Forward of one microbatch: ``eng(batch)``, or ``eng(*args, **kwargs)`` as the model takes them.

        Raises:
            EngineError: there is a pipeline, whose stages do not have the output; with ``open_pipeline``, an argument
                that requires a gradient, or parts whose outputs are no rows.
        """
        self._refuse_pipeline("eng(batch)")
        self._parts.complete(args[0] if len(args) == 1 and not kwargs else kwargs or args)
        assert self._parts.loop is not None
        with self._parts.comm.within(self._parts.update.made):
            return self._parts.loop.forward(args, kwargs)

    def backward(
        self,
        loss: Tensor | tuple[Tensor, Tensor | float],
        retain_graph: bool = False,
        metrics: Mapping[str, Any] | None = None,
    ) -> None:
        """Backward of one microbatch, or of one of its losses, which are added up.

        The gradient is averaged over the microbatches of the step and over data ranks; a loss (sum, weight) is divided
        by all weights of the step. Gradients are reduced over dp during the last backward. ``loss.backward()`` does
        the same, but the report of the step then has no loss (nan), and under fp16 it needs ``scale``.

        Args:
            loss: a 0-dim mean, or (sum, weight); it may depend on several forwards, and on several engines.
            retain_graph: keep the graph for another backward.
            metrics: values by the names of ``monitor.metrics`` for the report of the step, as ``loss_fn`` returns them:
                numbers, 0-dim tensors or (sum, weight).

        Raises:
            EngineError: backwards of more microbatches than ``gradient_accumulation_steps``; a loss that is not a
                scalar; a pipeline.
        """
        loop = self._looped("backward(loss)")
        with self._parts.comm.within(self._parts.update.made):
            loop.backward(loss, retain_graph, metrics or {})

    def scale(self, loss: Tensor) -> Tensor:
        """The 0-dim loss times the loss scale of fp16 (else 1), for a backward of your own: ``scale(loss).backward()``.

        Raises:
            EngineError: the loss is not a scalar, or depends on no parameter; a pipeline, also after ``open_pipeline``.
        """
        if (stages := self._parts.config.pp) > 1 and self._parts.control.piped:
            raise EngineError(
                f"scale(loss) with parallel.pipeline {stages}: a backward of your own ends at the outputs, "
                "and the stages behind them have to run back; call eng.backward(loss)."
            )
        return self._looped("scale(loss)").scale(loss)

    def clip_gradients(self, max_norm: float) -> float:
        """Clip the averaged gradient to this L2 norm in the ``step`` that follows, in place of ``gradient_clipping``
        (Pascanu et al. 2013).

        Called after the last backward of a step. Returns the norm before clipping, over all parameters. Collective:
        reduces what is not reduced yet, sums the weights over dp and the squares over the world, 8 bytes each.

        Raises:
            EngineError: ``max_norm`` is not above 0; inside an accumulation; a pipeline.
        """
        loop = self._looped("clip_gradients")
        with self._parts.comm.within(self._parts.update.made):
            return loop.clip(max_norm)

    def step(self) -> StepReport | None:
        """Update after the last microbatch of a step; after any other microbatch do nothing and return None.

        Raises:
            EngineError: no backward was called in this step; a gradient lacks the loss scale.
        """
        self._parts.resources.refuse_closed("step()")
        if self._parts.loop is None:
            raise EngineError("step() before backward(): there is no gradient to step with; call backward first.")
        with self._parts.comm.within(self._parts.update.made):
            finished = self._parts.loop.step()
        return None if finished is None else self._parts.report(finished)

    def zero_grad(self) -> None:
        """Drop the gradients since the last update, on all ranks alike. After an update there are none."""
        self._parts.resources.refuse_closed("zero_grad()")
        if self._parts.loop is not None:
            self._parts.loop.zero_grad()

    def guard_gradients(self, around: nn.Module | None = None) -> None:
        """Refuse code that looks for a gradient on its parameter, until the next forward, step or ``zero_grad``.

        Between a backward and its step the engine does so by itself; a host whose loop has parameters keep their
        gradients until it drops them calls this after the step.

        Args:
            around: a module of the host around the model, whose ``zero_grad`` is that of the engine from now on.
        """
        if self._parts.loop is not None:
            self._parts.loop.guard_gradients(around)

    def no_sync(self) -> AbstractContextManager[None]:
        """Inside, no backward is taken for the last one of a step, in which gradients are reduced.

        Results are the same without it: a step reduces what is not reduced yet. ZeRO 2 and 3 with
        ``reduce: microbatch`` keep shards only, and reduce in every backward.
        """
        self._refuse_pipeline("no_sync()")
        return self._parts.control.no_sync()

    def set_gradient_accumulation_boundary(self, boundary: bool | None) -> None:
        """Decide whether the next calls of ``step`` make an update (True) or only end a microbatch (False).

        The update averages over all microbatches since the last one. None: every ``gradient_accumulation_steps``.
        """
        self._refuse_pipeline("set_gradient_accumulation_boundary")
        self._parts.control.boundary = boundary

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the ``step`` after this microbatch makes an update."""
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
                "schedule, and no stage alone has the output; call train_batch(batch) or eval_batch(batch), or, for a "
                "loop of your own, eng.open_pipeline() before."
            )
