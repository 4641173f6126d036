"""What the sharded layers of a model send, found from one run of the cut model on shapes.

While the pipeline's probe runs the model, it is cut to the shapes that a rank holds, over an axis that communicates
nothing and tells what it would have sent; every collective of a backward is told in the forward that asks for it.
Recomputation repeats the collectives of a forward as far as it goes.

What becomes of the logits after the head, found by doing it again on shapes.

The glue that touches logits runs once more on meta tensors, by the rules that the run itself follows, over an axis
that notes what it is asked to send. So the budget and the run cannot differ in a rule.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from engine.parallel.comm.traffic import Op, Tally, Traffic, sent_bytes
from engine.parallel.model.forward_patch import ForwardPatches
from engine.parallel.tensor.collectives import LOGITS
from engine.parallel.tensor.layers.apply_plan import apply_shapes
from engine.parallel.tensor.layers.parameter_use import OutsideReads
from engine.parallel.tensor.logits.logit_shard import Vocabulary
from engine.parallel.tensor.logits.sharded_logits import ShardedLogits
from engine.parallel.tensor.plan.ranges import cut_unevenly
from engine.parallel.tensor.plan.tensor_plan import TensorPlan
from engine.parallel.tensor.tp_axis import DryAxis, Expected, TensorAxis
from engine.parallel.trace.model_trace import FreeTensor, FromValue, Glue, ModelTrace, Sample


@dataclass(frozen=True, slots=True)
class Sent:
    """One collective of a forward and its backward."""

    module: str
    """The innermost module that was running, or the last one that had run."""
    what: Expected
    repeated: bool = False
    """Recomputation of its block makes it once more."""


class TrafficRecorder:
    """Runs a model as a plan cuts it, on shapes, and notes what it would send.

    ``recomputed``: modules whose activations are recomputed, by name. Recomputation stops when the last tensor
    that backward needs is there, so a collective of a forward is repeated only if something after it saves one.
    """

    def __init__(self, model: nn.Module, plan: TensorPlan, recomputed: Mapping[str, nn.Module], tp: int) -> None:
        self._model, self._plan, self._recomputed = model, plan, recomputed
        self._axis = DryAxis(tp, self._note)
        self._sent: list[Sent] = []
        self._reads = OutsideReads(model, plan)
        self._running: list[str] = []
        self._last = ""
        self._saved = 0
        self._pending: list[tuple[int, int]] = []
        """(index of a collective, tensors saved until then) inside the running recomputed module."""
        self._partial: set[int] = set()

    @property
    def sent(self) -> tuple[Sent, ...]:
        """Of the last run, in its order."""
        return tuple(self._sent)

    @property
    def read_outside(self) -> tuple[str, ...]:
        """Cut parameters that code outside their modules reads."""
        return tuple(self._reads.names)

    @property
    def partial(self) -> frozenset[str]:
        """Whole parameters that met cut activations: each rank has a part of their gradient."""
        return frozenset(name for name, p in self._model.named_parameters() if id(p) in self._partial)

    @property
    def used_both_ways(self) -> frozenset[str]:
        """Those that met whole activations too, in code that no style speaks of."""
        both = self._partial & self._reads.plain
        names = (name for name, p in self._model.named_parameters() if id(p) in both)
        return frozenset(names) - self._plan.partial

    @property
    def used_one_way(self) -> frozenset[str]:
        """Those that met no whole activations."""
        one = self._partial - self._reads.plain
        return frozenset(name for name, p in self._model.named_parameters() if id(p) in one)

    @contextmanager
    def cut(self) -> Iterator[None]:
        """Inside, the model has the shapes that a tensor rank holds."""
        patches = ForwardPatches()
        views = apply_shapes(self._model, self._plan, self._axis, patches)
        try:
            yield
        finally:
            self._partial = {id(parameter) for parameter in views.partial}
            patches.remove()

    @contextmanager
    def run(self) -> Iterator[None]:
        """Around one run of the model; an earlier one is forgotten."""
        self._sent.clear()
        with ExitStack() as stack:
            for name, module in self._model.named_modules():
                handles = [
                    module.register_forward_pre_hook(partial(self._enter, name)),
                    module.register_forward_hook(partial(self._exit, name)),
                ]
                for handle in handles:
                    stack.callback(handle.remove)
            stack.enter_context(saved_tensors_hooks(self._pack, lambda saved: saved))
            stack.enter_context(self._reads.watching())
            try:
                yield
            finally:
                self._running.clear()

    def _note(self, what: Expected) -> None:
        if what.label == LOGITS:  # of shapes only: what becomes of logits is seen afterwards
            return
        if not what.backward:
            self._pending.append((len(self._sent), self._saved))
        self._sent.append(Sent(self._running[-1] if len(self._running) > 1 else self._last, what))

    def _pack(self, saved: Tensor) -> Tensor:
        self._saved += 1
        return saved.detach()  # an output saved as it is would refer to its own node, and keep the graph and the model

    def _enter(self, name: str, *_: object) -> None:
        self._running.append(name)
        self._last = name
        if name in self._recomputed:
            self._pending.clear()

    def _exit(self, name: str, *_: object) -> None:
        if self._running and self._running[-1] == name:
            self._running.pop()
        if name not in self._recomputed:
            return
        for index, saved in self._pending:
            if self._saved > saved:
                self._sent[index] = replace(self._sent[index], repeated=True)
        self._pending.clear()


def traffic_by_call(sent: tuple[Sent, ...], timeline: ModelTrace, tp: int) -> dict[int, Tally]:
    """What each call of the timeline makes a tensor rank send for one microbatch, forward and backward."""
    calls: dict[str, list[int]] = {}
    for index, call in enumerate(timeline.calls):
        calls.setdefault(call.unit, []).append(index)
    by_module: dict[str, list[Sent]] = {}
    for item in sent:
        by_module.setdefault(item.module, []).append(item)
    tallies: dict[int, Tally] = {}
    for module, items in by_module.items():
        places = next((calls[unit] for unit in calls if module == unit or module.startswith(f"{unit}.")), [0])
        for number, item in enumerate(items):
            tally = tallies.setdefault(places[number * len(places) // len(items)], Tally())
            for _ in range(1 + item.repeated):
                tally.add(_traffic(item.what.label, item.what.op, item.what.bytes, tp))
    return tallies


@dataclass(frozen=True, slots=True)
class LogitUse:
    """What a tensor rank sends for the logits of one microbatch, and for whom they are whole."""

    sent: tuple[Expected, ...]
    gathers: tuple[str, ...]
    """Function, file and line."""


def loss_traffic(use: LogitUse, tp: int) -> Tally:
    """What becomes of the logits after the head: a vocabulary-parallel loss, or a gather by whoever needs all."""
    return Tally([_traffic(sent.label, sent.op, sent.bytes, tp) for sent in use.sent])


def _traffic(label: str, op: Op, payload: int, tp: int) -> Traffic:
    return Traffic("tp", label, 1, sent_bytes(op, payload, tp))


def find_logit_use(plan: TensorPlan, timeline: ModelTrace, tp: int) -> LogitUse:
    """Replay the glue of ``timeline`` that reads what the heads of ``plan`` give."""
    told: list[Expected] = []
    axis = DryAxis(tp, told.append)
    logits = {number: _wrap(timeline, number, size, axis) for number, size in _made_by_heads(plan, timeline)}
    gathers: list[str] = []
    for glue in timeline.glue:
        leaves = tree_leaves(glue.arguments, is_leaf=_is_tensor)
        if logits.keys() & {leaf.source for leaf in leaves if isinstance(leaf, Sample)}:
            before = len(told)
            _replay(glue, timeline, logits)
            if any(sent.op == "all_gather" and not sent.backward for sent in told[before:]):
                gathers.append(f"{glue.name} at {glue.place}")
    return LogitUse(tuple(told), tuple(dict.fromkeys(gathers)))


def _made_by_heads(plan: TensorPlan, timeline: ModelTrace) -> Iterator[tuple[int, int]]:
    """(value, rows of the vocabulary) of every output of a head, or of a unit that holds one and passes it on."""
    kinds = {name: cut.kind for name, cut in plan.layers.items() if cut.kind in ("head", "embedding")}
    tables = (plan.parameters.get(f"{name}.weight") for name in kinds)  # a tied one goes by its first name
    sizes = {max(piece.stop for piece in table.ranges) for table in tables if table}
    heads = [name for name, kind in kinds.items() if kind == "head"]
    for call in timeline.calls:
        inside = any(name.startswith(f"{call.unit}.") for name in heads)
        for number in call.output.values() if inside or call.unit in heads else ():
            shape = timeline.values[number].shape
            if shape and (call.unit in heads or shape[-1] in sizes):
                yield number, shape[-1]


def _wrap(timeline: ModelTrace, number: int, size: int, axis: TensorAxis) -> ShardedLogits:
    value = timeline.values[number]
    widths = tuple(piece.stop - piece.start for piece in cut_unevenly(size, axis.size))
    local = torch.empty((*value.shape[:-1], widths[0]), dtype=value.dtype, device="meta", requires_grad=value.grad)
    return ShardedLogits.wrap(local, Vocabulary(axis, widths))


def _replay(glue: Glue, timeline: ModelTrace, logits: dict[int, ShardedLogits]) -> None:
    """Run one operation; what of its results is cut is added to ``logits``."""
    outputs = [leaf.value if isinstance(leaf, FromValue) else None for leaf in glue.output.leaves]
    made = [timeline.values[number] for number in glue.makes]
    args, kwargs = tree_map(lambda leaf: _stand_in(leaf, logits), glue.arguments, is_leaf=_is_tensor)
    with torch.set_grad_enabled(any(value.grad for value in made)):
        try:
            assert glue.function is not None
            found = tree_flatten(glue.function(*args, **kwargs))[0]
        except Exception:  # a shape that depends on content, or a function that meta tensors do not have
            source = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, ShardedLogits))
            keeps = glue.name == "__getitem__" and not source.gathered
            found = [
                _of_shape(source, timeline.values[number].shape) if keeps and number else None for number in outputs
            ]
    for number, result in zip(outputs, found, strict=False):
        if number is not None and isinstance(result, ShardedLogits):
            logits[number] = result.to(timeline.values[number].dtype)  # type: ignore[assignment]


def _of_shape(source: ShardedLogits, shape: tuple[int, ...]) -> ShardedLogits:
    part = source.part.local
    local = torch.empty((*shape[:-1], source.vocabulary.width), dtype=part.dtype, device="meta")
    return ShardedLogits.wrap(local.requires_grad_(part.requires_grad), source.vocabulary)


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, Sample | FreeTensor)  # tuples, which are no structure here


def _stand_in(leaf: Any, logits: dict[int, ShardedLogits]) -> Any:
    if isinstance(leaf, FreeTensor):
        return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")
    if not isinstance(leaf, Sample):
        return leaf
    if leaf.source in logits:
        return logits[leaf.source]
    stand_in: Tensor = torch.empty(leaf.shape, dtype=leaf.dtype, device="meta", requires_grad=leaf.grad)
    return stand_in
