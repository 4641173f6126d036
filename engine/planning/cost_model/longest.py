"""Longest sequence that fits on a number of GPUs, by layout. Pure arithmetic.

A step has one row for each data rank; with pipeline ranks, one microbatch of a row for each of them. The memory of a
rank grows with the length, so bisection finds the longest.

Bytes of sampled blocks are the maximum of several polynomials of the length: linear with attention in blocks, of
degree 2 with written scores. Short samples find a first length; a sample there corrects it, until both agree.

Logits exist in full where the head cannot leave them to the loss: on context ranks, and with sharded parameters.
"""

from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from math import lcm, prod
from types import MappingProxyType
from typing import NamedTuple

from engine.planning.cost_model.estimate import (
    CONTEXT_BYTES,
    SLACK,
    BlockSample,
    RankMemory,
    blocks_held,
    closed_memory,
    message_buffers,
    working_bytes,
)
from engine.planning.cost_model.layout import EngineTraits, StageShare, TrainingLayout, microbatches_held, slowest
from engine.planning.cost_model.search import USABLE, zero_stages
from engine.planning.cost_model.workload import Recomputation, Workload

MODES: tuple[tuple[Recomputation, bool], ...] = (
    ("none", False), ("selective", False), ("full", False), ("selective", True), ("full", True)
)  # fmt: skip
"""Recomputation modes, and True for inputs of blocks on the host."""
STEP = 256
"""Lengths are multiples of this number of tokens."""
SAMPLED = (256, 512, 1024)
"""Positions of a context rank in the three samples."""
LONGEST = 1 << 34
"""Upper limit of the bisection, in tokens."""
MOST_CORRECTED = 8
"""Most samples at a found length, each of which corrects it."""
GROWTH = 8
"""Largest ratio of a sampled length to the one before it."""
CLOSE = 0.05
"""Relative difference between a found length and a sampled one at which no other sample is made."""
GATHERED_INPUTS: Mapping[Recomputation, int] = MappingProxyType({"none": 1, "selective": 4, "full": 0})
"""Inputs of layers that a block stores with the positions of all tensor ranks."""
MOST_SAMPLED = 4
"""Most kinds of blocks that are sampled."""

LengthSample = Callable[[TrainingLayout, int], BlockSample | None]
"""Function (layout, tokens of a row) that returns counted bytes of a block; None: the model does not run on shapes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LongestRun:
    """Longest row for which a training layout has enough memory, with the bytes that this row needs."""

    layout: TrainingLayout
    length: int
    """Tokens of a row; 0 if none fits."""
    memory: RankMemory
    """Bytes of the fullest rank at this length."""
    host_bytes: float
    """Bytes of block inputs that each rank stores on its host."""
    counted: bool
    """True if bytes of blocks are counted on shapes; False: closed forms."""


def longest_length(memory_of: Callable[[int], float], limit: float, step: int) -> int:
    """Returns the longest multiple of ``step`` tokens for which ``memory_of`` returns at most ``limit`` bytes; 0 if
    none.

    ``memory_of``: non-decreasing function from a length to bytes. The search ends at 2^34 tokens.
    """
    low, high = 0, 1
    while high * step <= LONGEST and memory_of(high * step) <= limit:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if memory_of(middle * step) <= limit else (low, middle)
    return low * step


def long_layouts(work: Workload, world: int, node: int) -> Iterator[TrainingLayout]:
    """Yields all layouts of ``world`` ranks that the model allows, with one sequence in each microbatch and as many
    microbatches as pipeline ranks.

    ``node``: number of GPUs per node; the tensor ranks of a layout are within one node.
    """
    sizes = [size for size in range(1, world + 1) if world % size == 0]
    for cp, tp, pp in product(sizes, sizes, sizes):
        if world % (cp * tp * pp) or pp > work.blocks or tp > node or work.heads % tp or node % tp:
            continue
        dp = world // (cp * tp * pp)
        for (stage, reduction), (mode, host) in product(zero_stages(dp * cp), MODES):
            yield TrainingLayout(
                dp=dp, cp=cp, tp=tp, pp=pp, stage=stage, reduction=reduction, microbatches=pp, recomputation=mode,
                inputs="host" if host else "device",
            )  # fmt: skip


def longest_runs(
    work: Workload, layouts: Iterator[TrainingLayout], memory_bytes: float, sample: LengthSample | None = None
) -> list[LongestRun]:
    """Returns the longest sequence that fits in memory for each layout, by descending length.

    Layouts with counted bytes come before all others, unless the count fails for a layout that would be first.
    ``memory_bytes``: memory of a GPU. ``sample``: function that counts the bytes of a layout's blocks in a dry run
    (tensors without data); None: formulas only.
    """
    limit, curves = USABLE * memory_bytes, dict[Hashable, "_BlockCurves"]()
    runs = sorted((_longest(work, layout, limit, None) for layout in layouts), key=_order)
    while sample is not None and len(curves) < MOST_SAMPLED and not runs[0].counted and runs[0].length:
        kind = _blocks_of(runs[0].layout)
        found = _sampled(sample, runs[0].layout)
        if found is None:
            return runs
        found = _corrected(work, runs[0].layout, limit, (sample, found))
        curves[kind] = found
        runs = [_longest(work, one.layout, limit, found) if _blocks_of(one.layout) == kind else one for one in runs]
        runs.sort(key=_order)
    return sorted(runs, key=lambda one: not one.counted) if curves else runs


def _order(one: LongestRun) -> tuple[float, ...]:
    """Sorts longer rows first; among equal ones, layouts that recompute, shard and move less."""
    layout = one.layout
    mode = MODES.index((layout.recomputation, layout.inputs == "host"))
    return -one.length, mode, layout.stage, layout.pp, layout.tp, layout.cp, layout.keeps_gradient_shards


def _blocks_of(layout: TrainingLayout) -> Hashable:
    """Returns the settings that determine the bytes of a block on one rank."""
    return layout.tp, layout.cp, layout.sequence, layout.recomputation, layout.inputs


def bytes_at(length: int, lengths: Sequence[int], counted: Sequence[float]) -> float:
    """Returns the bytes for rows of ``length`` tokens, from the polynomial through the ``counted`` bytes for
    ``lengths``.
    """
    weights = (prod((length - other) / (own - other) for other in lengths if other != own) for own in lengths)
    return max(0.0, sum(weight * one for weight, one in zip(weights, counted, strict=True)))


class _BlockCurves(NamedTuple):
    """Bytes of sampled blocks at some lengths."""

    lengths: tuple[int, ...]
    samples: tuple[BlockSample, ...]

    def at(self, length: int) -> BlockSample:
        """Returns the bytes at a length, on the line through the two nearest samples."""
        first = min(max(bisect_left(self.lengths, length) - 1, 0), len(self.lengths) - 2)
        near = slice(first, first + 2)
        columns = zip(*self.samples[near], strict=True)
        return BlockSample(*(bytes_at(length, self.lengths[near], column) for column in columns))

    def with_sample(self, length: int, sample: BlockSample) -> "_BlockCurves":
        """Returns the curves through one more sample."""
        pairs = sorted([*zip(self.lengths, self.samples, strict=True), (length, sample)])
        return _BlockCurves(tuple(each for each, _ in pairs), tuple(each for _, each in pairs))


def _sampled(sample: LengthSample, layout: TrainingLayout) -> _BlockCurves | None:
    lengths = tuple(each * layout.cp * layout.tp for each in SAMPLED)
    found = [sample(layout, length) for length in lengths]
    known = tuple(one for one in found if one is not None)
    return _BlockCurves(lengths, known) if len(known) == len(lengths) else None


def _corrected(
    work: Workload, layout: TrainingLayout, limit: float, given: tuple[LengthSample, _BlockCurves]
) -> _BlockCurves:
    """Returns the curves with further samples, at the longest lengths that the curves so far find."""
    sample, curves = given
    for _ in range(MOST_CORRECTED):
        length = min(_longest(work, layout, limit, curves).length, GROWTH * curves.lengths[-1])
        made = None if any(abs(length - each) <= CLOSE * each for each in curves.lengths) else sample(layout, length)
        if made is None:
            break
        curves = curves.with_sample(length, made)
    return curves


def _longest(work: Workload, layout: TrainingLayout, limit: float, curves: _BlockCurves | None) -> LongestRun:
    stage = slowest(work, layout.pp, 1.0, 0.0)
    memory_of = partial(_memory, work, layout, stage, curves)
    length = longest_length(lambda length: memory_of(length).total, limit, lcm(STEP, 2 * layout.cp * layout.tp))
    blocks = stage.blocks * microbatches_held(layout)
    inputs = work.keeps("full").on(layout.tp, layout.sequence) * layout.micro * length / layout.cp * blocks
    return LongestRun(
        layout=layout,
        length=length,
        memory=memory_of(length),
        host_bytes=inputs if layout.inputs == "host" else 0.0,
        counted=curves is not None,
    )


def _memory(
    work: Workload, layout: TrainingLayout, stage: StageShare, curves: _BlockCurves | None, length: int
) -> RankMemory:
    """Returns the bytes of the fullest rank for rows of ``length`` tokens."""
    work = replace(work, context=length)
    memory = closed_memory(work, layout, EngineTraits(), stage)
    _, logits, again = working_bytes(work, layout, EngineTraits())
    logits = 0.0 if _leaves_logits(layout) else logits * (layout.pp == 1 or stage.heads > 0)
    inputs = GATHERED_INPUTS[layout.recomputation] * _gathered_bytes(work, layout)
    activations = memory.activations + inputs * blocks_held(layout, stage.blocks, microbatches_held(layout))
    around = max(logits, again + _backward_bytes(work, layout))
    if curves is not None:
        sample = curves.at(length)
        activations = sample.kept * layout.micro * stage.blocks * microbatches_held(layout)
        around = max(logits, sample.around * layout.micro)
    buffers = around + message_buffers(work, layout, stage)
    slack = CONTEXT_BYTES + SLACK * (activations + buffers)
    return replace(memory, activations=activations, buffers=buffers, slack=slack)


def _leaves_logits(layout: TrainingLayout) -> bool:
    """Returns True if the loss computes logits in chunks, so that they never exist in full."""
    return layout.stage < 3 or layout.dp * layout.cp == 1


def _backward_bytes(work: Workload, layout: TrainingLayout) -> float:
    """Returns the bytes of one block's backward beside its activations, in 16 bits.

    Gradients of the widest input and output live together. Under sequence parallelism the block's input, the input of
    a layer and both gradients exist for the positions of all tensor ranks.
    """
    tokens = layout.micro * work.context / layout.cp / layout.tp
    widest = max(product.outer for product in work.products) + max(product.inner for product in work.products)
    return 2 * tokens * widest + 4 * _gathered_bytes(work, layout)


def _gathered_bytes(work: Workload, layout: TrainingLayout) -> float:
    """Returns the bytes of a tensor between blocks with the positions of all tensor ranks; 0 if they share none."""
    shares = layout.tp > 1 and layout.sequence
    return 2.0 * layout.micro * work.context / layout.cp * work.width if shares else 0.0
