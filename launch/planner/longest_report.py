"""Report of ``trine plan --longest``: the longest row that fits, its layout and its bytes; as text and as JSON."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from engine.errors import ConfigError
from engine.launch.planner.plan_report import GIB, memory_kinds, room_text
from engine.launch.planner.plan_request import PlanAsked
from engine.planning.cost_model.longest import LongestRun, long_layouts, longest_runs
from engine.planning.cost_model.workload import Workload

if TYPE_CHECKING:
    from engine.launch.planner.planned_model import SampledBlocks

_COLUMNS = ("parameters", "gradients", "optimizer", "activations", "buffers", "communication", "slack")


def find_longest(asked: PlanAsked, work: Workload, samples: "SampledBlocks | None") -> list[LongestRun]:
    """Finds, for each number of context ranks, the longest training row (sequence) that fits in GPU memory, with its
    layout.

    The longest of all is the first result.

    Args:
        work: the model's FLOPs and tensor sizes.
        samples: measured memory of the model's blocks; None: closed-form estimates.

    Raises:
        ConfigError: no layout fits even the shortest row that is tried.
    """
    layouts = long_layouts(work, asked.world, asked.node)
    sample = None if samples is None else lambda layout, length: samples.of(layout, length=length)
    runs = longest_runs(work, layouts, asked.gpu.memory_bytes, sample)
    if not runs[0].length:
        least = min(runs, key=lambda one: one.memory.total)
        raise ConfigError(
            f"no layout on {asked.world} GPUs fits even a short row: the smallest state needs "
            f"{least.memory.total / GIB:.1f} GiB, but {room_text(asked.gpu.memory_bytes)}; give more GPUs, or GPUs "
            "with more memory."
        )
    best = dict[int, LongestRun]()
    for one in runs:
        best.setdefault(one.layout.cp, one)
    first = runs[0]
    return [first, *(one for cp, one in sorted(best.items()) if cp != first.layout.cp and one.length)]


def longest_text(asked: PlanAsked, runs: Sequence[LongestRun], declared: int | None) -> str:
    """Formats ``runs``, the longest rows with their layouts, as a table. ``declared``: number of positions in the
    model's configuration, or None.
    """
    return "\n".join(_lines(asked, runs, declared))


def _lines(asked: PlanAsked, runs: Sequence[LongestRun], declared: int | None) -> Iterator[str]:
    first = runs[0]
    yield f"model: {asked.model.words}"
    yield f"gpu: {asked.world} x {asked.gpu.name}, {asked.node} a node; {room_text(asked.gpu.memory_bytes)}"
    yield f"longest: {first.length:,} tokens a row, {first.layout}"
    yield "GiB of the fullest GPU, and of its host"
    heads = ("tokens", *_COLUMNS, "total", "host")
    yield "  ".join(f"{head:>{_width(head)}}" for head in heads) + "  layout"
    for one in runs:
        kinds = memory_kinds(one.memory)
        values = [*(kinds[name] for name in _COLUMNS), one.memory.total, one.host_bytes]
        cells = (f"{value / GIB:>{_width(head)}.2f}" for value, head in zip(values, heads[1:], strict=True))
        counted = ", counted" * one.counted
        yield "  ".join([f"{one.length:>{_width('tokens')},}", *cells]) + f"  {one.layout}{counted}"
    if declared is not None and declared < first.length:
        yield f"note: the model declares {declared:,} positions; longer rows need positions that it was not trained on"


def _width(head: str) -> int:
    return max(len(head), 13 if head == "tokens" else 6)


def longest_json(asked: PlanAsked, runs: Sequence[LongestRun], settings: dict[str, Any]) -> dict[str, Any]:
    """Returns ``runs``, the longest rows with their layouts, as a JSON object; ``settings``: configuration for
    the first of them.
    """
    return {
        "model": asked.model.words,
        "gpu": asked.gpu.name,
        "world": asked.world,
        "gpus_of_a_node": asked.node,
        "gpu_memory_bytes": asked.gpu.memory_bytes,
        "longest": _as_json(runs[0]),
        "by_context": [_as_json(one) for one in sorted(runs, key=lambda one: one.layout.cp)],
        "config": settings,
    }


def _as_json(one: LongestRun) -> dict[str, Any]:
    layout = one.layout
    return {
        "tokens": one.length,
        "layout": str(layout),
        "data": layout.dp,
        "context": layout.cp,
        "tensor": layout.tp,
        "pipeline": layout.pp,
        "zero_stage": layout.stage,
        "recomputation": layout.recomputation,
        "inputs": layout.inputs,
        "memory_bytes": {**memory_kinds(one.memory), "total": one.memory.total},
        "host_bytes": one.host_bytes,
        "counted": one.counted,
    }
