"""Published training speeds as data, each with the settings that its source gives, and those that are assumed."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from engine.planning.cost_model.estimate import LayoutEstimate, StepModel
from engine.planning.cost_model.hardware import GpuSpec, ReachedShares, load_gpu
from engine.planning.cost_model.layout import EngineTraits, TrainingLayout
from engine.planning.cost_model.workload import DecoderShape, Workload

FILE = Path(__file__).parent / "published.json"
FITTED = ("h100", "a100")
"""Kinds of GPUs with factors of their own; the others have those of h100, and their rows only check."""
NODE = 8
"""GPUs of a node in all rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRow:
    """A figure, and what is predicted for it."""

    name: str
    gpu: str
    shape: Mapping[str, Any]
    layout: Mapping[str, Any]
    traits: Mapping[str, Any]
    published: float
    unit: Literal["TFLOP/s", "tokens/s", "% MFU"]
    """Of a GPU; MFU of the bf16 peak of the data sheet."""
    count: Literal["all pairs", "recomputed"]
    """FLOPs that the source counts: attention of all pairs of tokens, or one more forward of the blocks besides."""
    hardware: Mapping[str, Any]
    """Values in place of those of the GPU's file."""
    source: str
    mark: Literal["S", "R"]
    """S: read in the source; R: remembered from a paper and not read again."""
    assumed: str
    """Settings that the source does not give."""
    memory_gib: float | None
    """Of the fullest GPU, as the source reports it; None: it does not."""
    fitted: bool
    """The factors were chosen with this row; the other half only checks them."""

    def predict(self, reached: ReachedShares | None = None) -> tuple[float, LayoutEstimate]:
        """The figure in its unit, and the estimate behind it; ``reached``: in place of the file's."""
        gpu = _gpu(self.gpu)
        changed: GpuSpec = replace(gpu, reached=reached or gpu.reached, **self.hardware)
        work = DecoderShape(**self.shape).workload()
        estimate = StepModel(work, changed, NODE, EngineTraits(**self.traits)).estimate(TrainingLayout(**self.layout))
        if self.unit == "tokens/s":
            return estimate.tokens_per_second, estimate
        flops = estimate.tokens_per_second * self.flops_of_token(work)
        return (flops / 1e12 if self.unit == "TFLOP/s" else 100 * flops / gpu.bf16_rate), estimate

    def flops_of_token(self, work: Workload) -> float:
        """As the source counts them."""
        model = work.flops_of_token()
        head = sum(6 * product.weights for product in work.head)
        return model + (model - head) / 3 if self.count == "recomputed" else model


@cache
def _gpu(name: str) -> GpuSpec:
    return load_gpu(name)


def read_rows() -> tuple[PublishedRow, ...]:
    """All rows; of each kind in FITTED the first, third and so on are those that its factors were fitted to."""
    seen: dict[str, int] = {}
    rows = []
    for raw in json.loads(FILE.read_text(encoding="utf-8"))["rows"]:
        number = seen[raw["gpu"]] = seen.get(raw["gpu"], -1) + 1
        rows.append(PublishedRow(**raw, fitted=raw["gpu"] in FITTED and number % 2 == 0))
    return tuple(rows)


def not_predicted() -> tuple[tuple[str, str], ...]:
    """(figure, why the model says nothing about it)."""
    return tuple((raw["what"], raw["why"]) for raw in json.loads(FILE.read_text(encoding="utf-8"))["not_predicted"])
