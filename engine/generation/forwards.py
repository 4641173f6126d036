"""Forwards of one generation on this rank, with caches, on every grid.

one stage     the model's forward, and nothing else
stages        the executor runs the forward of each stage; the trace of a token is that of any number of cached ones
ZeRO 3        parameters are gathered once if the plan keeps all of them over a step, else in each forward
data ranks    that gather in each forward, or share experts, agree before each forward whether any has one left
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from engine.generation.caches import StageCaches
from engine.parallel.pipeline.runtime.executor import StageMicrobatch, StageOutput, rank_schedule
from engine.parallel.pipeline.runtime.outputs import Carrier, bring_outputs
from engine.parallel.tensor.logits.sharded_logits import gather_logits
from engine.program.batch import map_tensors
from engine.program.program import evaluating
from engine.step.batch_check import check_batch, check_paths
from engine.step.runtime import PipelineRuntime, RankRuntime
from engine.step.trace_cache import TracedForward

Arguments = Mapping[str, Any]
"""Keyword arguments of the model's forward, without its cache."""

_IDS = "input_ids"
_SHAPED = ("input_ids", "inputs_embeds", "position_ids", "token_type_ids")
"""Arguments whose shapes choose a trace; a mask grows with the cache, and chooses none."""


class GenerationForwards:
    """Model forwards of one text generation on this rank.

    All ranks of a replica (one full copy of the model) call its methods in the same order with equal arguments.
    """

    def __init__(self, runtime: RankRuntime) -> None:
        self._runtime, self._comm, self._device = runtime, runtime.comm, runtime.program.device
        plan, coord = runtime.plan, runtime.comm.grid.coord()
        self._row = rank_schedule(plan.forwards(1), coord.pp)
        gathers = plan.gathers(coord)
        self._holds = gathers is not None and len(gathers.pinned) == len(gathers.sizes)
        self._meets = runtime.comm.grid.experts > 1 or (runtime.gatherer is not None and not self._holds)
        self._known: dict[object, TracedForward] = {}
        self._compares = False
        self._last: Arguments = {}
        self.decides = coord.pp == plan.last_rank
        """True on ranks that have the model's outputs without a transfer."""

    @contextmanager
    def opened(self, checked: Any) -> Iterator[None]:
        """Returns a context manager around all forwards of one generation, in eval mode without autograd.

        The ranks of a replica (one full copy of the model) first compare hashes of the tensors in ``checked``. With
        expert parallelism, or if each forward gathers parameters, a forward needs all data ranks: at its end, the
        context takes part in other ranks' forwards until all have ended their generation.

        Raises:
            EngineError: the ranks were given different tensors.
        """
        runtime = self._runtime
        with evaluating(runtime.program.model), torch.no_grad(), runtime.running():
            moved = runtime.pipeline is not None and runtime.pipeline.traces.refresh()
            self._compares = check_batch([checked], None, self._comm, self._device, moved)
            with runtime.gatherer.held() if runtime.gatherer is not None and self._holds else nullcontext():
                yield
                while self._meets and self._any_left(False):
                    self._accompany()

    def run(
        self, arguments: Arguments, caches: StageCaches | None, finish: Callable[[Any], Any], everywhere: bool
    ) -> Any:
        """Runs one forward of the model over all pipeline stages, and returns ``finish(output)``.

        Args:
            arguments: keyword arguments of the forward, on this rank's device; ``input_ids`` [rows, positions] are the
                tokens that the caches lack.
            caches: caches that the forward reads and extends; None: no cache.
            finish: callback from the model's output to a tensor or a pytree of tensors.
            everywhere: True: sends the result to all pipeline stages. False: ranks without the last stage return None.
        """
        if self._meets:
            self._any_left(True)
        self._last = {_IDS: arguments[_IDS][:, -1:]}
        if caches is not None:
            caches.follow_crop()
        found = self._forward(arguments, caches, finish, everywhere)
        if caches is not None:
            rows, positions = arguments[_IDS].shape
            caches.advance(rows, positions, partly=self._runtime.pipeline is not None)
        return found

    def _forward(
        self, arguments: Arguments, caches: StageCaches | None, finish: Callable[[Any], Any], everywhere: bool
    ) -> Any:
        runtime = self._runtime
        if (pipeline := runtime.pipeline) is None:
            with runtime.passes(self._row), runtime.forward(), runtime.counting(None):
                return self._call(arguments, None if caches is None else caches.of(0), caches, finish)
        traced = self._trace(pipeline, arguments, caches, finish)
        stages = _StageForwards(runtime, traced, lambda cache: self._call(arguments, cache, caches, finish), caches)
        with runtime.passes(self._row):
            runtime.executor.run(self._row, stages)
        results = [] if stages.result is None else [stages.result]
        if everywhere:
            carrier = Carrier(self._comm, self._device, runtime.plan.last_rank, everywhere=True)
            results = bring_outputs(results, [traced.trace], runtime.program.model, carrier)
        return results[0] if results else None

    def _call(self, arguments: Arguments, cache: Any, caches: StageCaches | None, finish: Callable[[Any], Any]) -> Any:
        runtime, given = self._runtime, dict(arguments)
        program = runtime.program
        if runtime.pipeline is not None:  # another stage of this rank reads them after this one
            given = map_tensors(given, torch.clone)
        if caches is not None:
            given[caches.name] = cache
        with program.replay.forward(arguments) if program.replay is not None else nullcontext():
            return runtime.own(finish(runtime.watched(given, lambda: program.model(**given))))

    def _trace(
        self, pipeline: PipelineRuntime, arguments: Arguments, caches: StageCaches | None, finish: Callable[[Any], Any]
    ) -> TracedForward:
        """Returns the traced forward of these arguments: one trace for any number of cached positions above 0."""
        shaped = {name: arguments[name] for name in _SHAPED if isinstance(arguments.get(name), Tensor)}
        kind = f"generate {sorted(arguments)} {caches and caches.length > 0} {finish}"
        key = (kind, *((name, value.shape) for name, value in shaped.items()))
        if key in self._known:
            return self._known[key]
        problem: Exception | None = None
        found: list[TracedForward] = []
        try:
            with self._runtime.without_content():
                run = partial(self._rehearse, arguments, caches, finish)
                found.append(pipeline.traces.of(shaped, kind, run))
        except Exception as error:
            problem = error
        if self._compares:
            check_paths([traced.digest for traced in found], problem, self._comm, self._device)
        if problem is not None:
            raise problem
        if self._compares:
            pipeline.traces.agree()
        self._known[key] = found[0]
        return found[0]

    def _rehearse(self, arguments: Arguments, caches: StageCaches | None, finish: Callable[[Any], Any]) -> Any:
        """Runs a forward on shapes, for a trace, with a cache of shapes."""
        if caches is None:
            return self._call(arguments, None, None, finish)
        cache = caches.rehearsal()
        result = self._call(arguments, cache, caches, finish)
        if not caches.length:
            caches.rehearse(cache)
        return result

    # ------------------------------------------------------------------ data ranks

    def _any_left(self, own: bool) -> bool:
        """Returns True if any data rank has a forward left; 8 bytes over the axis of rows, label "generate"."""
        left = torch.tensor([int(own)], device=self._device)
        self._comm.all_reduce(left, self._comm.grid.rows, "generate", "max").wait()
        return bool(left)

    def _accompany(self) -> None:
        """Takes part in a forward of other data ranks: gathers their parameters; with experts, runs a token."""
        runtime = self._runtime
        if self._comm.grid.experts > 1:
            self._forward(self._last, None, logits_of, everywhere=False)
            return
        with runtime.passes(self._row):
            for _ in self._row.passes:
                with runtime.joining_forward():
                    pass


def logits_of(output: Any) -> Tensor:
    """Returns the logits of a model's ``output``: a tensor, an attribute ``logits``, or the first element of a tuple.

    All-gathers logits that are sharded over tensor ranks.
    """
    found = getattr(output, "logits", None)
    if not isinstance(found, Tensor):
        found = output if isinstance(output, Tensor) else output[0]
    return gather_logits(found)  # type: ignore[no-any-return]


class _StageForwards:
    """Stages of this rank in one forward, which the executor runs."""

    def __init__(
        self, runtime: RankRuntime, traced: TracedForward, call: Callable[[Any], Any], caches: StageCaches | None
    ) -> None:
        self._runtime, self._traced, self._call, self._caches = runtime, traced, call, caches
        self.result: Any = None
        """Result of the forward, on the last stage."""

    def part(self, stage: int, microbatch: int) -> StageMicrobatch:
        """Returns the plan of a stage, with the values of the trace."""
        return StageMicrobatch(self._traced.partition.stages[stage], self._traced.trace.values)

    def forward(self, stage: int, microbatch: int, received: Mapping[int, Tensor]) -> StageOutput:
        """Runs a stage with its cache."""
        runtime, (trace, partition) = self._runtime, self._traced
        assert runtime.pipeline is not None, "only pipelines have stages"
        plan = partition.stages[stage]
        run = partial(self._call, None if self._caches is None else self._caches.of(stage))
        with runtime.forward(), runtime.counting(None):
            done = runtime.pipeline.stage.forward(trace, plan, run, received)
            if plan.last:
                self.result = done.result
            return StageOutput(runtime.own(done.sent), None)

    def backward(self, action: Any) -> Any:
        """Never called: a generation has no backward."""
        raise AssertionError("a generation has no backward")

    def weights(self, stage: int, microbatch: int) -> None:
        """Never called: a generation has no backward."""

    def beside(self, stage: int, microbatch: int) -> Any:
        """Never called: a generation has no backward."""
        return nullcontext()
