"""What becomes of the logits after the head, found by doing it again on shapes.

The glue that touches logits runs once more on meta tensors, by the rules that the run itself follows, over an axis
that notes what it is asked to send. So the budget and the run cannot differ in a rule.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from engine.parallel.pipeline.timeline import FreeTensor, FromValue, Glue, Sample, Timeline
from engine.parallel.tensor.axis import DryAxis, Expected, TensorAxis
from engine.parallel.tensor.cuts import TensorPlan
from engine.parallel.tensor.logit_slice import Vocabulary
from engine.parallel.tensor.ranges import cut_unevenly
from engine.parallel.tensor.sharded_logits import ShardedLogits


@dataclass(frozen=True, slots=True)
class LogitUse:
    """What a tensor rank sends for the logits of one microbatch, and for whom they are whole."""

    sent: tuple[Expected, ...]
    gathers: tuple[str, ...]
    """Function, file and line."""


def find_logit_use(plan: TensorPlan, timeline: Timeline, tp: int) -> LogitUse:
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


def _made_by_heads(plan: TensorPlan, timeline: Timeline) -> Iterator[tuple[int, int]]:
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


def _wrap(timeline: Timeline, number: int, size: int, axis: TensorAxis) -> ShardedLogits:
    value = timeline.values[number]
    widths = tuple(piece.stop - piece.start for piece in cut_unevenly(size, axis.size))
    local = torch.empty((*value.shape[:-1], widths[0]), dtype=value.dtype, device="meta", requires_grad=value.grad)
    return ShardedLogits.wrap(local, Vocabulary(axis, widths))


def _replay(glue: Glue, timeline: Timeline, logits: dict[int, ShardedLogits]) -> None:
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
