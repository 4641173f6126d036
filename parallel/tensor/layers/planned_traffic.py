"""Traffic of a tensor plan: bytes that each rank sends, counted in runs of the model on shapes.

layers    the tracer runs the model with the shapes of one rank's shards, over a dry axis that reports every
          collective; collectives of backward are reported by the forward that causes them, and count if the loss
          reaches their autograd node. Recomputation repeats the collectives of a forward up to the
          last tensor that backward needs.
logits    the glue operations after the head run once more on meta tensors, under the same rules as in training,
          so that the traffic of the loss is counted by the code that causes it.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from engine.errors import first_line
from engine.parallel.comm.encoded_collectives import ActivationFormat
from engine.parallel.comm.traffic import Tally, Traffic, sent_bytes
from engine.parallel.model.forward_patch import ForwardPatches
from engine.parallel.model.name_patterns import is_inside
from engine.parallel.model.user_code import call_user_code, is_own_mistake
from engine.parallel.tensor.collectives import LOGITS
from engine.parallel.tensor.layers.apply_plan import apply_shapes
from engine.parallel.tensor.layers.parameter_use import OutsideReads
from engine.parallel.tensor.layers.size_answers import WholeSizeAnswers
from engine.parallel.tensor.logits.logit_shard import Vocabulary
from engine.parallel.tensor.logits.sharded_logits import ShardedLogits
from engine.parallel.tensor.plan.ranges import cut_unevenly
from engine.parallel.tensor.plan.tensor_plan import TensorPlan
from engine.parallel.tensor.tp_axis import DryAxis, Expected, ExpectedRows, Node, TensorAxis
from engine.parallel.trace.model_trace import FreeTensor, FromValue, Glue, ModelTrace, Sample


@dataclass(frozen=True, slots=True)
class Sent:
    """Record of one planned collective over ``axis``: operation, label and bytes."""

    module: str
    """Innermost running module; outside all modules, the last one that ran."""
    what: Expected | ExpectedRows
    axis: TensorAxis
    repeated: bool = False
    """True if recomputation of a block repeats the collective."""


class CollectiveRecorder:
    """Recorder of the collectives that a model would run. Nothing is sent over ``axes``.

    ``recomputed``: modules with recomputed activations, by name. ``partly``: modules recomputed except for operators
    with saved outputs. A collective that recomputation repeats counts twice.
    """

    def __init__(
        self,
        model: nn.Module,
        recomputed: Mapping[str, nn.Module],
        *axes: DryAxis,
        partly: Mapping[str, nn.Module] = MappingProxyType({}),
    ) -> None:
        self._model, self._recomputed, self._partly = model, recomputed, partly
        for axis in axes:
            axis.listener = partial(self._note, axis)
        self._sent: list[Sent] = []
        self._nodes: list[Node | None] = []
        """The autograd node of each collective of backward; None for a collective of forward."""
        self._running: list[str] = []
        self._last = ""
        self._saved = 0
        self._pending: list[tuple[int, int]] = []
        """(index of a collective, number of tensors saved before it) in the running recomputed module."""

    @property
    def sent(self) -> tuple[Sent, ...]:
        """Collectives of the last recorded run, in the order of their calls."""
        return tuple(self._sent)

    def cut(self) -> AbstractContextManager[None]:
        """Returns a context in which the model has the shapes of one rank's shards; here, no change."""
        return nullcontext()

    def _watching(self) -> AbstractContextManager[object]:
        return nullcontext()

    @contextmanager
    def run(self) -> Iterator[None]:
        """Records the collectives of one model run inside the context, and discards earlier records."""
        self._sent.clear()
        self._nodes.clear()
        with ExitStack() as stack:
            for name, module in self._model.named_modules():
                handles = [
                    module.register_forward_pre_hook(partial(self._enter, name)),
                    module.register_forward_hook(partial(self._exit, name)),
                ]
                for handle in handles:
                    stack.callback(handle.remove)
            stack.enter_context(saved_tensors_hooks(self._pack, lambda saved: saved))
            stack.enter_context(self._watching())
            try:
                yield
            finally:
                self._running.clear()

    def keep_reached(self, loss: Tensor) -> None:
        """Discards the recorded backward collectives that the backward of ``loss`` would not run."""
        reached = _nodes_before(loss.grad_fn)
        kept = [sent for sent, node in zip(self._sent, self._nodes, strict=True) if node is None or node in reached]
        self._sent, self._nodes = kept, [None] * len(kept)

    def _note(self, axis: TensorAxis, what: Expected | ExpectedRows, node: Node | None) -> None:
        if what.label == LOGITS:  # the dry run's own gather; find_logit_use counts the collectives of the logits
            return
        if not what.backward:
            self._pending.append((len(self._sent), self._saved))
        self._sent.append(Sent(self._running[-1] if len(self._running) > 1 else self._last, what, axis))
        self._nodes.append(node)

    def _pack(self, saved: Tensor) -> Tensor:
        self._saved += 1
        # a saved output refers to its own node, which would keep the graph and the model alive
        return saved.detach()

    def _enter(self, name: str, *_: object) -> None:
        self._running.append(name)
        self._last = name
        if name in self._recomputed or name in self._partly:
            self._pending.clear()

    def _exit(self, name: str, *_: object) -> None:
        if self._running and self._running[-1] == name:
            self._running.pop()
        if name not in self._recomputed and name not in self._partly:
            return
        for index, saved in self._pending:
            if self._saved > saved and (name in self._recomputed or self._sent[index].axis.name != "tp"):
                self._sent[index] = replace(self._sent[index], repeated=True)
        self._pending.clear()


class TrafficRecorder(CollectiveRecorder):
    """Recorder of the collectives that ``model`` would run, sharded by ``plan`` over ``tp`` tensor ranks.

    ``wire``: encoding of activations for transfers, or None. ``others``: further axes with collectives to record;
    nothing is sent. ``recomputed``, ``partly``: modules with recomputed activations, as in :class:`CollectiveRecorder`.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: TensorPlan,
        recomputed: Mapping[str, nn.Module],
        tp: int,
        wire: ActivationFormat | None = None,
        *others: DryAxis,
        partly: Mapping[str, nn.Module] = MappingProxyType({}),
    ) -> None:
        self._plan, self._axis = plan, DryAxis(tp)
        self._axis.wire = wire
        for axis in (self._axis, *others):
            axis.nested = bool(others)
        super().__init__(model, recomputed, self._axis, *others, partly=partly)
        self._reads = OutsideReads(model, plan)
        self._partial: set[int] = set()

    @property
    def read_outside(self) -> tuple[str, ...]:
        """Names of sharded parameters that code outside their own modules reads."""
        return tuple(self._reads.names)

    @property
    def partial(self) -> frozenset[str]:
        """Names of replicated parameters with partial gradients: they are used with sharded activations."""
        return frozenset(name for name, p in self._model.named_parameters() if id(p) in self._partial)

    @property
    def used_both_ways(self) -> frozenset[str]:
        """Names of replicated parameters that are used with sharded and with full activations.

        Parameters with partial gradients in the plan are left out.
        """
        both = self._partial & self._reads.plain
        names = (name for name, p in self._model.named_parameters() if id(p) in both)
        return frozenset(names) - self._plan.partial

    @property
    def used_one_way(self) -> frozenset[str]:
        """Names of replicated parameters that are used only with sharded activations."""
        one = self._partial - self._reads.plain
        return frozenset(name for name, p in self._model.named_parameters() if id(p) in one)

    @contextmanager
    def cut(self) -> Iterator[None]:
        """Gives the model's parameters the shapes of one tensor rank's shards inside the context."""
        patches, sizes = ForwardPatches(), WholeSizeAnswers(self._model, self._plan)
        context = apply_shapes(self._model, self._plan, self._axis, patches)
        sizes.install(self._model, patches)
        try:
            yield
        finally:
            self._partial = {id(parameter) for parameter in context.partial}
            patches.remove()

    def _watching(self) -> AbstractContextManager[object]:
        return self._reads.watching()


def _nodes_before(last: Node | None) -> set[Node]:
    """Returns ``last`` and all autograd nodes that its backward reaches."""
    found: set[Node] = set()
    waiting = [last]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in found:
            found.add(node)
            waiting += [before for before, _ in node.next_functions]
    return found


def traffic_by_call(sent: tuple[Sent, ...], timeline: ModelTrace, rank: int = 0) -> dict[int, Tally]:
    """Returns the traffic of ``rank`` for forward and backward of one microbatch, by index into ``timeline.calls``.

    Each value counts collectives and bytes by axis and label. ``sent``: recorded collectives of the microbatch.
    """
    calls: dict[str, list[int]] = {}
    for index, call in enumerate(timeline.calls):
        calls.setdefault(call.unit, []).append(index)
    by_module: dict[str, list[Sent]] = {}
    for item in sent:
        by_module.setdefault(item.module, []).append(item)
    tallies: dict[int, Tally] = {}
    for module, items in by_module.items():
        places = next((calls[unit] for unit in calls if is_inside(module, unit)), [0])
        for number, item in enumerate(items):
            tally = tallies.setdefault(places[number * len(places) // len(items)], Tally())
            for _ in range(1 + item.repeated):
                tally.add(_traffic(item.axis, item.what, rank))
    return tallies


@dataclass(frozen=True, slots=True)
class LogitUse:
    """Collectives of one tensor rank for one microbatch's logits, and the functions that gather the full logits."""

    sent: tuple[Expected, ...]
    gathers: tuple[str, ...]
    """Function, file and line of each gather."""
    unknown: tuple[str, ...] = ()
    """Function, file, line and reason of each operation that cannot be replayed; ``sent`` lacks its collectives."""


def loss_traffic(use: LogitUse, tp: int) -> Tally:
    """Returns the traffic, by axis and label, of one of ``tp`` tensor ranks for operations on logits after the head, in
    forward and backward.

    ``use``: result of :func:`find_logit_use`.
    """
    return Tally([_traffic(DryAxis(tp), sent) for sent in use.sent])


def _traffic(axis: TensorAxis, sent: Expected | ExpectedRows, rank: int = 0) -> Traffic:
    size = sent.sent[rank] if isinstance(sent, ExpectedRows) else sent_bytes(sent.op, sent.bytes, axis.size)
    return Traffic(axis.name, sent.label, 1, size)


def find_logit_use(plan: TensorPlan, timeline: ModelTrace, tp: int) -> LogitUse:
    """Returns the collectives that one of ``tp`` tensor ranks runs for the logits, and the functions that gather full
    logits.

    ``timeline``: trace of the model with its loss. Communicates nothing.
    """
    told: list[Expected] = []
    axis = DryAxis(tp, lambda what, _: told.append(what))
    logits = {number: _wrap(timeline, number, size, axis) for number, size in _made_by_heads(plan, timeline)}
    reached = _values_of_loss(timeline)
    gathers: list[str] = []
    unknown: list[str] = []
    for glue in timeline.glue:
        leaves = tree_leaves(glue.arguments, is_leaf=_is_tensor)
        if logits.keys() & {leaf.source for leaf in leaves if isinstance(leaf, Sample)}:
            before = len(told)
            problem = _replay(glue, timeline, logits)
            if reached.isdisjoint(glue.makes):  # a metric that is not detached has no backward either
                told[before:] = [sent for sent in told[before:] if not sent.backward]
            if any(sent.op == "all_gather" and not sent.backward for sent in told[before:]):
                gathers.append(f"{glue.name} at {glue.place}")
            elif problem:
                unknown.append(f"{glue.name} at {glue.place} ({problem})")
    return LogitUse(tuple(told), tuple(dict.fromkeys(gathers)), tuple(dict.fromkeys(unknown)))


def _values_of_loss(timeline: ModelTrace) -> set[int]:
    """Returns the values that the gradient of the loss flows through; the loss is the first leaf of the result."""
    found: set[int] = set()
    waiting = [leaf.value for leaf in timeline.result.leaves[:1] if isinstance(leaf, FromValue)]
    while waiting:
        value = timeline.values[waiting.pop()]
        if value.grad and value.number not in found:
            found.add(value.number)
            waiting += value.inputs
    return found


def _made_by_heads(plan: TensorPlan, timeline: ModelTrace) -> Iterator[tuple[int, int]]:
    """Yields (value, vocabulary size) for each output of a head, or of a unit that contains a head and returns
    logits."""
    kinds = {name: cut.kind for name, cut in plan.layers.items() if cut.kind in ("head", "embedding")}
    tables = (plan.parameters.get(f"{name}.weight") for name in kinds)  # a tied table is listed by its first name
    sizes = {max(piece.stop for piece in table.ranges) for table in tables if table}
    heads = [name for name, kind in kinds.items() if kind == "head"]
    for call in timeline.calls:
        has_head = any(is_inside(name, call.unit) for name in heads)
        for number in call.output.values() if has_head else ():
            shape = timeline.values[number].shape
            if shape and (call.unit in heads or shape[-1] in sizes):
                yield number, shape[-1]


def _wrap(timeline: ModelTrace, number: int, size: int, axis: TensorAxis) -> ShardedLogits:
    value = timeline.values[number]
    widths = tuple(piece.stop - piece.start for piece in cut_unevenly(size, axis.size))
    local = torch.empty((*value.shape[:-1], widths[0]), dtype=value.dtype, device="meta", requires_grad=value.grad)
    return ShardedLogits.wrap(local, Vocabulary(axis, widths))


def _replay(glue: Glue, timeline: ModelTrace, logits: dict[int, ShardedLogits]) -> str:
    """Runs one glue operation and adds results that are still sharded to ``logits``.

    Returns:
        The reason, in one line, why the sharding of the results is unknown; empty if the sharding is known.
    """
    problem = ""
    outputs = [leaf.value if isinstance(leaf, FromValue) else None for leaf in glue.output.leaves]
    args, kwargs = tree_map(lambda leaf: _stand_in(leaf, logits), glue.arguments, is_leaf=_is_tensor)
    with torch.set_grad_enabled(any(number in timeline.graded for number in glue.makes)):
        assert glue.function is not None
        try:
            found = tree_flatten(call_user_code(glue.function, args, kwargs))[0]
        except Exception as error:  # the shape depends on content, or the function has no meta implementation
            if is_own_mistake(error):
                raise
            source = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, ShardedLogits))
            keeps = glue.name == "__getitem__" and not source.gathered
            problem = "" if keeps else first_line(error)
            found = [
                _of_shape(source, timeline.values[number].shape) if keeps and number else None for number in outputs
            ]
    for number, result in zip(outputs, found, strict=False):
        if number is not None and isinstance(result, ShardedLogits):
            logits[number] = result.to(timeline.values[number].dtype)  # type: ignore[assignment]
    return problem


def _of_shape(source: ShardedLogits, shape: tuple[int, ...]) -> ShardedLogits:
    part = source.part.local
    local = torch.empty((*shape[:-1], source.vocabulary.width), dtype=part.dtype, device="meta")
    return ShardedLogits.wrap(local.requires_grad_(part.requires_grad), source.vocabulary)


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, Sample | FreeTensor)  # named tuples, which tree functions would otherwise open


def _stand_in(leaf: Any, logits: dict[int, ShardedLogits]) -> Any:
    if isinstance(leaf, FreeTensor):
        return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")
    if not isinstance(leaf, Sample):
        return leaf
    if leaf.source in logits:
        return logits[leaf.source]
    stand_in: Tensor = torch.empty(leaf.shape, dtype=leaf.dtype, device="meta", requires_grad=leaf.grad)
    return stand_in
