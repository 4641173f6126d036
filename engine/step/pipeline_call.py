"""Call of a pipelined model from the user's own loop: ``eng(batch)`` runs all stages, and the loop computes the loss.

    forward     the stages run; the last one sends its outputs to all ranks of the pipeline (axis pp, label "outputs")
    loss        every rank computes it, from the same outputs
    backward    the last stage has the output gradients already, so none is sent; the stages run their backwards

In between, all activations are live, as in GPipe (Huang et al. 2019). Several calls may wait for a backward, which runs
the latest first. The autograd graph is cut at the outputs, and resumed there by another backward:

loss -> ... -> outputs | cut         the first backward stores the gradients of the outputs
               outputs | root -> ... the second backward starts with them, on the last stage

An input that requires a gradient gets a part of it on each stage that reads it; their sum over pp (label "input
gradients") is its gradient on every rank.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from engine.errors import EngineError
from engine.parallel.comm.comm import Comm
from engine.parallel.pipeline.runtime.executor import RankSchedule, StageMicrobatch, StageOutput, rank_schedule
from engine.parallel.pipeline.runtime.outputs import Carrier, bring_outputs
from engine.parallel.pipeline.schedule.actions import Action
from engine.parallel.pipeline.schedule.one_f_one_b import there_and_back
from engine.parallel.tensor.logits.sharded_logits import gather_logits
from engine.parallel.trace.model_trace import FreeTensor, FromParameter, FromValue, Leaf, ModelTrace
from engine.program.batch import map_tensors, named_tensors, tensors_by_path
from engine.program.batch_rows import BatchRows
from engine.step.batch_check import check_paths
from engine.step.microbatches import microbatch_copy
from engine.step.runtime import PipelineRuntime, RankRuntime
from engine.step.trace_cache import TracedForward
from engine.zero.reduce.reducer import Backward

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of the model's forward."""


def cut_arguments(args: tuple[Any, ...], kwargs: dict[str, Any], cut: BatchRows, rows: int | None) -> list[Arguments]:
    """Splits arguments of the model's forward into parts of ``rows`` rows; None: one part.

    The last part may have fewer rows. Mappings become plain dicts. ``cut``: splitter of batches by rows.

    Raises:
        EngineError: tensors have different numbers of rows.
    """
    if rows is None:
        return [(map_tensors(args, _same), map_tensors(kwargs, _same))]
    if args and kwargs:
        return [(tuple(part[0]), part[1]) for part in cut.split((args, kwargs), rows)]
    if kwargs:
        return [((), part) for part in cut.split(kwargs, rows)]
    if len(args) == 1:
        return [((part,), {}) for part in cut.split(args[0], rows)]
    return [(tuple(part), {}) for part in cut.split(args, rows)]


def _same(tensor: Tensor) -> Tensor:
    return tensor


def check_joins(trace: ModelTrace, part: Arguments) -> None:
    """Checks that the outputs in ``trace``, a forward on one ``part`` of a batch, can be concatenated along dim 0.

    Raises:
        EngineError: an output in ``trace`` has no dim of rows, such as a mean over rows.
    """
    rows = {tensor.shape[0] for _, tensor in tensors_by_path(part) if tensor.ndim}
    for leaf in trace.result.leaves:
        if isinstance(leaf, FromValue):
            shape = trace.values[leaf.value].shape
        elif isinstance(leaf, FreeTensor):
            shape = leaf.shape
        elif isinstance(leaf, FromParameter):
            shape = ()
        else:
            continue
        if not shape or shape[0] not in rows:
            what = f"a tensor of shape {shape}" if shape else "a number, such as the mean of a loss,"
            raise EngineError(
                f"the model returns {what} for a microbatch, but outputs of microbatches are joined along their rows; "
                "compute the loss from the joined outputs, or leave train_micro_batch_size_per_gpu out of "
                "engine_config, so that a batch is one microbatch."
            )


def joined_parts(outputs: Sequence[Any]) -> Any:
    """Joins the outputs of all parts: tensors are concatenated along dim 0; other values come from the first part."""
    if len(outputs) == 1:
        return outputs[0]
    spec = pytree.tree_structure(outputs[0])
    columns = zip(*(pytree.tree_leaves(output) for output in outputs), strict=True)
    return pytree.tree_unflatten([_joined(column) for column in columns], spec)


def _joined(column: tuple[Any, ...]) -> Any:
    return torch.cat(column) if isinstance(column[0], Tensor) else column[0]


INPUT_GRADIENTS = "input gradients"
Gradients = Sequence[Tensor | None]
"""Gradient of each tensor; None if the loss does not read it."""


def cut_graph(tensors: list[Tensor], arrive: Callable[[Gradients], None]) -> tuple[Tensor, ...]:
    """Returns ``tensors`` attached to a new autograd graph. The caller may write into the returned tensors; a backward
    passes the gradients of the returned tensors to the callback ``arrive``.
    """
    anchor = torch.empty(0, requires_grad=True)
    attached: tuple[Tensor, ...] = _Cut.apply(anchor, _Given(tensors, arrive))  # type: ignore[no-untyped-call]
    return attached


def resume_graph(tensors: Sequence[Tensor], gradients: list[Tensor | None]) -> Tensor:
    """Returns a 0-dim tensor; its backward continues in the graphs of ``tensors``, with one of ``gradients`` for each.

    The caller fills the list ``gradients`` before the backward, which empties it. An empty list counts as all None.
    """
    root: Tensor = _Root.apply(gradients, *tensors)  # type: ignore[no-untyped-call]
    return root


class GradedInputs:
    """Inputs of ``eng(batch)`` that require gradients; the pipeline stages run on copies of them.

    Raises:
        EngineError: an input that requires a gradient was computed from other tensors.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], ranks: int) -> None:
        given = (args, kwargs) if args and kwargs else kwargs or (args[0] if len(args) == 1 else args)
        named = named_tensors(given) if torch.is_grad_enabled() else ()
        graded = [(name, tensor) for name, tensor in named if tensor.requires_grad]
        for name, tensor in graded:
            if not tensor.is_leaf:
                raise EngineError(
                    f"{name} requires a gradient and was computed from other tensors, but with parallel.pipeline "
                    f"{ranks} a backward ends at the inputs of the call; pass x = {name}.detach().requires_grad_(), "
                    "and call backward(x.grad) on the original afterwards."
                )
        self._copies: list[tuple[Tensor, Tensor]] = []
        self.arguments: Arguments = args, kwargs
        """The arguments, with a copy of each such input."""
        if graded:
            self.arguments = map_tensors(args, self._copy), map_tensors(kwargs, self._copy)

    def _copy(self, tensor: Tensor) -> Tensor:
        if not tensor.requires_grad:
            return tensor
        self._copies.append((tensor, tensor.detach().requires_grad_()))
        return self._copies[-1][1]

    @property
    def present(self) -> bool:
        """True if an input requires a gradient."""
        return bool(self._copies)

    def accumulate(self, comm: Comm) -> None:
        """Sums the gradients of the inputs' copies over all pipeline ranks, and adds them to the ``grad`` of each
        input.
        """
        for tensor, copy in self._copies:
            grad = torch.zeros_like(copy) if copy.grad is None else copy.grad.contiguous()
            copy.grad = None
            comm.all_reduce(grad, "pp", INPUT_GRADIENTS).wait()
            torch.autograd.backward(tensor, grad)


class _Given:
    """Arguments that autograd must not take for inputs."""

    def __init__(self, tensors: list[Tensor], arrive: Callable[[Gradients], None]) -> None:
        self.tensors, self.arrive = tensors, arrive


class _Cut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, given: _Given) -> tuple[Tensor, ...]:
        ctx.arrive = given.arrive
        ctx.set_materialize_grads(False)
        return tuple(given.tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None]:
        ctx.arrive(gradients)
        return None, None


class _Root(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor | None], *tensors: Tensor) -> Tensor:
        ctx.gradients, ctx.count = gradients, len(tensors)
        return tensors[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        gradients = ctx.gradients[:] or [None] * ctx.count
        ctx.gradients.clear()
        return None, *gradients


_KIND = "call"
"""Kind of these forwards among the traces."""


@dataclass(slots=True)
class _Arrivals:
    """Calls with gradients of their outputs in the running backward."""

    open: bool = False
    """A backward of the engine's runs."""
    calls: "list[PipelineCall]" = field(default_factory=list)
    updates: int = 0
    """Times that weights may have changed."""


class PipelineCalls:
    """Runner of the user's ``eng(batch)`` calls on a pipeline: their forwards and backwards on this rank."""

    def __init__(self, runtime: RankRuntime) -> None:
        self._runtime, self._pipeline = runtime, _pipeline_of(runtime)
        self._arrivals, self._numbers = _Arrivals(), count(1)
        self.compares_paths = False
        """An attribute of the model has changed on a rank, so the ranks compare their traces of the next call."""
        self._newest: Arguments | None = None
        """Arguments of the newest call that may be differentiated."""
        self._rows: dict[int, RankSchedule] = {}
        """This rank's actions, by the number of parts."""

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any], key: tuple[int, ...], rows: int | None) -> Any:
        """Runs all stages on one batch; returns the model's output with an autograd graph on every rank of the replica.

        Sends activations between stages over pp, and outputs from the last stage to all.

        Args:
            key: seed of the random numbers of the forward.
            rows: number of rows of each part into which the batch is split; None: one part.

        Raises:
            EngineError: an argument with a gradient is no leaf of autograd, or the outputs of several parts cannot be
                joined. Raised before anything is sent.
            PlanError: the forward does not fit the partition.
        """
        runtime, inputs = self._runtime, GradedInputs(args, kwargs, self._runtime.plan.config.pp)
        parts = cut_arguments(*inputs.arguments, runtime.program.rows, rows)
        call = PipelineCall(runtime, parts, self._row(len(parts)), key, self._arrivals, next(self._numbers))
        call.inputs = inputs
        call.trace(self.compares_paths)
        if torch.is_grad_enabled():
            self._newest = parts[0]
        return call.run()

    def _row(self, parts: int) -> RankSchedule:
        if parts not in self._rows:
            schedule = there_and_back(self._runtime.plan.schedule.stages_of_rank, parts)
            self._rows[parts] = rank_schedule(schedule, self._runtime.comm.grid.coord().pp)
        return self._rows[parts]

    @contextmanager
    def backward(self, which: Backward) -> Iterator[None]:
        """Opens a context for a backward from a loss to the outputs of ``eng(batch)`` calls.

        At its end, the stages run the backwards of these calls. ``which.last``: True for the step's last backward.
        """
        arrivals = self._arrivals
        arrivals.open = True
        try:
            yield
            calls = sorted(arrivals.calls, key=lambda call: call.number, reverse=True)
            for place, call in enumerate(calls):
                last, further = which.last and call is calls[-1], which.further and not place
                call.run_back(which._replace(last=last, further=further))
                call.inputs.accumulate(self._runtime.comm)
        finally:
            arrivals.open = False
            arrivals.calls.clear()

    @property
    def updates(self) -> int:
        """Count of events that may change weights, such as updates; a backward raises if it grew since its forward."""
        return self._arrivals.updates

    @updates.setter
    def updates(self, number: int) -> None:
        self._arrivals.updates = number

    def check_trace(self) -> None:
        """Traces the newest call again after a NaN loss, to check that the forward has not changed.

        Raises:
            EngineError: the forward has changed since it was traced.
        """
        assert self._newest is not None, "a call came before its backward"
        run = partial(_run, self._runtime, self._newest)
        with torch.enable_grad(), self._runtime.without_content():
            self._pipeline.traces.check_trace(self._newest, _KIND, run)


class PipelineCall:
    """One ``eng(batch)`` on a pipeline: its forward and its later backward, run by the pipeline executor."""

    inputs: GradedInputs

    def __init__(
        self, runtime: RankRuntime, parts: Sequence[Arguments], row: RankSchedule, key: tuple[int, ...],
        arrivals: _Arrivals, number: int,
    ) -> None:  # fmt: skip
        """Takes ``row``: the actions of this rank, forwards and then backwards."""
        self._runtime, self._pipeline = runtime, _pipeline_of(runtime)
        self._arguments, self._row, self._key = parts, row, key
        self._arrivals = arrivals
        self.number = number
        """Calls of this loop up to this one."""
        self._executor = runtime.executor.apart()
        self._traced: list[TracedForward] = []
        self._results: list[Any] = []
        """Outputs of each microbatch, on the last stage."""
        self._gradients: list[list[Tensor | None]] = [[] for _ in parts]
        """Gradients of the outputs of each microbatch, once they have arrived."""
        self._which = Backward(last=False)
        self._backwards: Counter[int] = Counter()
        """Backwards that each stage has begun."""
        self._spent, self._updates = False, arrivals.updates
        """True if the backward of the stages has run, and the number of updates before the call."""

    def trace(self, compares: bool) -> None:
        """Traces the forward of each part of the batch; with ``compares``, ranks of the replica compare their traces.

        Raises:
            EngineError: outputs of several parts cannot be joined, or traces differ between ranks.
            PlanError: a forward does not fit the stages.
            Exception: error of the model's forward.
        """
        problem: Exception | None = None
        try:
            self._trace_parts()
        except Exception as error:
            problem = error
        if compares:
            paths, comm = [traced.digest for traced in self._traced], self._runtime.comm
            check_paths(paths, problem, comm, self._runtime.program.device)
        if problem is not None:
            raise problem
        if compares:
            self._pipeline.traces.agree()

    def _trace_parts(self) -> None:
        runtime = self._runtime
        with runtime.without_content():
            for part in self._arguments:
                self._traced.append(self._pipeline.traces.of(part, _KIND, partial(_run, runtime, part)))
        if len(self._arguments) > 1:
            for part, traced in zip(self._arguments, self._traced, strict=True):
                check_joins(traced.trace, part)

    def run(self) -> Any:
        """Runs the forwards of all stages; returns the output of the batch on every rank of the pipeline."""
        runtime, forwards = self._runtime, range(len(self._row.actions) // 2)
        carrier = Carrier(runtime.comm, runtime.program.device, runtime.plan.last_rank, everywhere=True)
        with runtime.running(), runtime.passes(self._passes(forwards)):
            self._executor.run_part(self._row, self, forwards)
            traces = [traced.trace for traced in self._traced]
            results, self._results = self._results, []
            brought = bring_outputs(results, traces, runtime.program.model, carrier)
        return joined_parts([self._attached(index, result) for index, result in enumerate(brought)])

    def run_back(self, which: Backward) -> None:
        """Runs the backwards of this rank's stages from stored output gradients; if ``which.last``, reduces over dp."""
        self._which, self._spent = which, True
        backwards = range(len(self._row.actions) // 2, len(self._row.actions))
        with self._runtime.running(), self._runtime.passes(self._passes(backwards)):
            self._executor.run_part(self._row, self, backwards)

    def arrive(self, part: int, gradients: Sequence[Tensor | None]) -> None:
        """Stores ``gradients`` of the outputs of part ``part``, from which the stages later run their backward.

        Raises:
            EngineError: ``loss.backward()`` was called instead of ``eng.backward(loss)``, this call had a backward
                before, or weights have changed.
        """
        ranks = self._runtime.plan.config.pp
        if not self._arrivals.open:
            raise EngineError(
                f"loss.backward() was called with parallel.pipeline {ranks}, where it reaches the outputs and not the "
                "stages that computed them; call eng.backward(loss), or accelerator.backward(loss), in place of "
                "loss.backward()."
            )
        if self._spent:
            raise EngineError(
                f"backward was called twice through one forward with parallel.pipeline {ranks}, where stages keep "
                "their activations for one backward; add the losses before one backward, or call the model again."
            )
        if self._updates != self._arrivals.updates:
            raise stale_forward()
        if self not in self._arrivals.calls:
            self._arrivals.calls.append(self)
        self._gradients[part][:] = gradients

    def _passes(self, actions: range) -> RankSchedule:
        return self._row._replace(passes=self._row.actions[actions.start : actions.stop])

    def _attached(self, index: int, result: Any) -> Any:
        """Returns the output of a microbatch with a graph that ends at the outputs, for this rank's loop."""
        leaves, spec = pytree.tree_flatten(result)
        leaves = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        if places := self._graded(self._traced[index].trace):
            attached = cut_graph([leaves[place] for place in places], partial(self.arrive, index))
            for place, tensor in zip(places, attached, strict=True):
                leaves[place] = tensor
        (output,) = pytree.tree_unflatten(leaves, spec)
        return output

    def _graded(self, trace: ModelTrace) -> list[int]:
        """Returns places of the outputs through which a gradient flows back, equal on every rank."""
        if not torch.is_grad_enabled():
            return []
        parameters, inputs = dict(self._runtime.program.model.named_parameters()), self.inputs

        def flows(leaf: Leaf) -> bool:
            if isinstance(leaf, FromParameter):
                return parameters[leaf.parameter].requires_grad
            if isinstance(leaf, FreeTensor):  # computed from inputs alone
                return leaf.dtype.is_floating_point and inputs.present
            return isinstance(leaf, FromValue) and trace.values[leaf.value].grad

        return [place for place, leaf in enumerate(trace.result.leaves) if flows(leaf)]

    # ------------------------------------------------------------------ what the executor calls

    def part(self, stage: int, microbatch: int) -> StageMicrobatch:
        """Returns the plan of ``stage``, and descriptions of the tensors traced with batch part ``microbatch``."""
        traced = self._traced[microbatch]
        return StageMicrobatch(traced.partition.stages[stage], traced.trace.values)

    def forward(self, stage: int, microbatch: int, received: Mapping[int, Tensor]) -> StageOutput:
        """Runs ``stage`` on batch part ``microbatch``, with tensors ``received`` from other stages.

        Returns the tensors to send and, on the last stage, the tensor from which the backward starts.
        """
        runtime, (trace, partition) = self._runtime, self._traced[microbatch]
        run, plan = partial(_run, runtime, self._arguments[microbatch]), partition.stages[stage]
        key = self._key if len(self._arguments) == 1 else (*self._key, -1 - microbatch)
        with runtime.forward(*key, trace=trace):
            done = self._pipeline.stage.forward(trace, plan, run, received)
            sent = runtime.own(done.sent)
        if not plan.last:
            return StageOutput(sent, None)
        self._results.append(done.result)
        leaves = pytree.tree_leaves(done.result)
        outputs = [leaves[place] for place in self._graded(trace)]
        graded = any(tensor.requires_grad for tensor in outputs)
        return StageOutput(sent, resume_graph(outputs, self._gradients[microbatch]) if graded else None)

    def backward(self, action: Action) -> AbstractContextManager[None]:
        """Returns the context of a stage's backward; the stage's last one of a step reduces its gradients over dp."""
        args, kwargs = self._arguments[action.microbatch]
        self._runtime.begin_backward(args[0] if len(args) == 1 and not kwargs else kwargs)
        self._backwards[action.stage] += 1
        last = self._which.last and self._backwards[action.stage] == len(self._arguments)
        which = self._which._replace(last=last, stage=action.stage, microbatch=action.microbatch)
        self._which = self._which._replace(further=False)
        return self._runtime.backward(which)

    def weights(self, stage: int, microbatch: int) -> None:
        """Raises AssertionError, because a user's loop defers no weight gradients."""
        raise AssertionError("there and back has no deferred weight gradients")

    def beside(self, stage: int, microbatch: int) -> AbstractContextManager[None]:
        """Returns a context that does nothing, because there are no deferred weight gradients."""
        return nullcontext()


def _pipeline_of(runtime: RankRuntime) -> PipelineRuntime:
    assert runtime.pipeline is not None, "calls are made of stages"
    return runtime.pipeline


def stale_forward() -> EngineError:
    """Returns the error to raise for a backward if weights were updated after its forward."""
    return EngineError(
        "backward was called after step(), but the weights have changed since the forward that it differentiates; "
        "call eng(batch) again, and backward before step()."
    )


def _run(runtime: RankRuntime, given: Arguments) -> tuple[Any]:
    """Returns the plain output of the model, alone in a tuple, from copies of its input."""
    args, kwargs = microbatch_copy(given, runtime.program.device)
    output = runtime.watched((args, kwargs), lambda: runtime.program.call(*args, **kwargs))
    return (runtime.own(gather_logits(output)),)
