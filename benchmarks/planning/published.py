"""Published training speeds, with the settings that each source states and those that are assumed."""

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
"""GPU types with fitted factors; other types use h100's."""
NODE = 8
"""Number of GPUs per node in all rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRow:
    """Published training speed with its settings."""

    name: str
    gpu: str
    shape: Mapping[str, Any]
    layout: Mapping[str, Any]
    traits: Mapping[str, Any]
    published: float
    unit: Literal["TFLOP/s", "tokens/s", "% MFU"]
    """Unit per GPU; MFU relative to the data sheet's bf16 peak."""
    count: Literal["all pairs", "recomputed"]
    """Method of the source's FLOP count: attention over all token pairs, or recomputation included."""
    hardware: Mapping[str, Any]
    """Entries that override the GPU's file."""
    source: str
    mark: Literal["S", "R"]
    """Reliability: "S", read in the source; "R", remembered from a paper."""
    assumed: str
    """Settings that the source omits and are assumed."""
    memory_gib: float | None
    """Memory of the fullest GPU in GiB; None: not reported."""
    fitted: bool
    """True if the factors were fitted to this row; False if the row only checks them."""

    def predict(self, reached: ReachedShares | None = None) -> tuple[float, LayoutEstimate]:
        """Returns the predicted figure in its unit, and the estimate; ``reached``: factors to use instead of the GPU
        file's.
        """
        gpu = _gpu(self.gpu)
        changed: GpuSpec = replace(gpu, reached=reached or gpu.reached, **self.hardware)
        work = DecoderShape(**self.shape).workload()
        estimate = StepModel(work, changed, NODE, EngineTraits(**self.traits)).estimate(TrainingLayout(**self.layout))
        if self.unit == "tokens/s":
            return estimate.tokens_per_second, estimate
        flops = estimate.tokens_per_second * self.flops_of_token(work)
        return (flops / 1e12 if self.unit == "TFLOP/s" else 100 * flops / gpu.bf16_rate), estimate

    def flops_of_token(self, work: Workload) -> float:
        """Returns the FLOPs per token by the source's count."""
        model = work.flops_of_token()
        head = sum(6 * product.weights for product in work.head)
        return model + (model - head) / 3 if self.count == "recomputed" else model


@cache
def _gpu(name: str) -> GpuSpec:
    return load_gpu(name)


def read_rows() -> tuple[PublishedRow, ...]:
    """Reads all rows; of each GPU type in FITTED, marks every other row, from the first, as fitted."""
    seen: dict[str, int] = {}
    rows = []
    for raw in json.loads(FILE.read_text(encoding="utf-8"))["rows"]:
        number = seen[raw["gpu"]] = seen.get(raw["gpu"], -1) + 1
        rows.append(PublishedRow(**raw, fitted=raw["gpu"] in FITTED and number % 2 == 0))
    return tuple(rows)


def not_predicted() -> tuple[tuple[str, str], ...]:
    """Returns pairs (figure, reason why it is not predicted)."""
    return tuple((raw["what"], raw["why"]) for raw in json.loads(FILE.read_text(encoding="utf-8"))["not_predicted"])
