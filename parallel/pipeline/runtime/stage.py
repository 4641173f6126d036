"""Runs the stages of a partition on one model, in the user's own forward.

A model may hold several stages (virtual stages) and see several input signatures: each forward brings its own
trace and plan. Independent of neighbours and ranks: received tensors come in, tensors to send come out.

Parameters of other stages are placeholders without values, which code outside the engine must not read. Their NaNs
would travel silently into what a user makes of ``eng.module`` on one rank: an output, a moving average of the weights,
a file of ``torch.save``. While the engine runs the model, glue may compute on them; what it makes is compared with the
trace and replaced by received values.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from traceback import clear_frames
from typing import Any

import torch
from torch import Tensor, nn

from engine.errors import EngineError
from engine.parallel.model.forward_patch import ForwardPatches, Interception, PatchLayer
from engine.parallel.model.placeholders import PlaceholderPool
from engine.parallel.model.torch_checkpoint import open_checkpoints, recomputed, spread_checkpoints
from engine.parallel.pipeline.partition.stage_plan import StagePlan
from engine.parallel.pipeline.runtime.glue_forward import GlueForward
from engine.parallel.pipeline.runtime.stage_forward import StageForward, StopForward
from engine.parallel.trace.absent_parameter import conceal
from engine.parallel.trace.model_trace import ModelTrace


@dataclass(frozen=True)
class StageResult:
    """Result of the forward of one stage."""

    result: Any
    """Result of the program; None if another stage reaches its end."""
    sent: dict[int, Tensor]
    """Tensor of each value in the plan's ``sends``, attached to autograd.

    A tensor made by a unit is what its forward returned, before forward hooks, which run on the stage that receives it.
    """


class Stage:
    """A model whose forwards can be run one stage at a time."""

    def __init__(self, model: nn.Module, device: torch.device, patches: ForwardPatches) -> None:
        self._model, self._placeholders = model, PlaceholderPool(device)
        self._parameters = dict(model.named_parameters())
        self._intercepted: set[str] = set()
        self._interception = Interception(
            handler=self._call, layer=PatchLayer.STAGE, patches=patches, skips=self._skips
        )
        self._run: StageForward | None = None
        self._seen: ModelTrace | None = None

    def forward(
        self, trace: ModelTrace, plan: StagePlan, program: Callable[[], Any], received: Mapping[int, Tensor]
    ) -> StageResult:
        """Run ``program``, from which the trace was made, as far as ``plan`` needs.

        Args:
            received: a leaf tensor for each value of ``plan.receives``, requiring a gradient if the value's ``grad``
                says so and this is training.

        The caller runs backward from ``sent`` with the sum of the gradients that receivers return; the gradients for
        earlier stages are then in ``.grad`` of ``received``.

        Raises:
            EngineError: the program takes another path than in the trace, or a value has another shape.
        """
        if received.keys() != plan.receives.keys():
            raise EngineError(
                f"stage {plan.stage} was given the values {sorted(received)}, and it receives {sorted(plan.receives)}."
            )
        self._intercept(trace)
        kind = GlueForward if plan.tier == 2 else StageForward
        run = kind(trace, plan, received, self._parameters, self._placeholders)
        result = None
        before, self._run = self._run, run
        try:
            with open_checkpoints(recompute=True), spread_checkpoints(run), run.watching():
                result = program()
        except StopForward as stop:
            if stop.run is not run:
                raise
            # context managers in the abandoned frames (autocast, no_grad) must exit now, not at garbage collection
            clear_frames(stop.__traceback__)
        finally:
            self._run = before
        run.finish()
        sent = {number: run.sent[number] for number in plan.sends}
        return StageResult(result if plan.last else None, sent)

    def _intercept(self, trace: ModelTrace) -> None:
        if trace is self._seen:
            return
        self._seen = trace
        for unit in trace.units:
            if unit not in self._intercepted:
                self._intercepted.add(unit)
                note = "runs where its pipeline stage is; on other stages the call is answered without it"
                self._interception.install(unit, self._model.get_submodule(unit), note)

    def _skips(self, unit: str) -> bool:
        return self._run is not None and self._run.takes(unit) and self._run.skips_next()

    def _call(self, unit: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        run = self._run
        if run is None or not run.takes(unit):  # recomputed in backward, or inside another unit
            return forward(*args, **kwargs)
        if run.regions and torch.is_grad_enabled() and not run.skips_next():
            forward = recomputed(forward, run.regions[-1])
        return run.call(unit, forward, args, kwargs)


class AbsentParameters:
    """Guards of the parameters of ``model`` that are not in ``present``, from now on; ties count by identity.

    Args:
        stages: the pipeline ranks that hold each parameter, by name.
        rank: this pipeline rank.
    """

    def __init__(
        self, model: nn.Module, present: Collection[str], stages: Mapping[str, Collection[int]], rank: int
    ) -> None:
        self._rank = rank
        self._running = self._closed = False
        kept = {id(parameter) for name, parameter in model.named_parameters() if name in present}
        for name, parameter in model.named_parameters():
            if id(parameter) not in kept:
                where = f"on pipeline rank {' and '.join(map(str, sorted(stages[name])))}"
                conceal(parameter, partial(self._read, name, where), where)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Context of the engine's own passes, whose code between units may read absent parameters."""
        before, self._running = self._running, True
        try:
            yield
        finally:
            self._running = before

    def retire(self) -> None:
        """Mark the engine as closed; reads then say so."""
        self._closed = True

    def _read(self, name: str, where: str) -> None:
        if self._running:
            return
        absent = f"parameter {name!r} is {where} and has no values on this rank, which is pipeline rank {self._rank}"
        if self._closed:
            raise EngineError(f"{absent}, and its engine is closed; call eng.full_state_dict() before closing it.")
        raise EngineError(
            f"{absent}; run the model by eng.train_batch(batch) or eng.eval_batch(batch, return_output=True), and read "
            "weights by eng.full_state_dict(), eng.save_pretrained(folder) or, those of this rank alone, by "
            "`with eng.full_parameters() as parameters:`."
        )
