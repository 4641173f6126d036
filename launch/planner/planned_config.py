"""From a layout to the JSON configuration that runs it. No torch."""

from collections.abc import Mapping
from typing import Any

from engine.planning.cost_model.layout import TrainingLayout

BUCKET = 64_000_000
"""Elements of a reduction: few calls, whose latency grows with the data ranks."""


def settings_of(layout: TrainingLayout, base: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The configuration of ``layout``; what it does not decide is taken from ``base``."""
    given = dict(base or {"bf16": {"enabled": True}, "optimizer": {"type": "AdamW", "params": {"lr": 3e-4}}})
    parallel = {"data": layout.dp, "tensor": layout.tp, "pipeline": layout.pp}
    more: dict[str, Any] = {}
    if layout.tp > 1:
        more["sequence_parallel"] = layout.sequence
    if layout.pp > 1:
        more |= {"schedule": layout.schedule, "virtual_stages": layout.virtual}
    zero: dict[str, Any] = {"stage": layout.stage} | ({"reduce_bucket_size": BUCKET} if layout.dp > 1 else {})
    if layout.stage >= 2:
        zero["reduce"] = layout.reduction
    return given | {
        "train_batch_size": layout.rows,
        "train_micro_batch_size_per_gpu": layout.micro,
        "gradient_accumulation_steps": layout.microbatches,
        "parallel": {**given.get("parallel", {}), **parallel, **more},
        "zero_optimization": {**given.get("zero_optimization", {}), **zero},
        "activation_checkpointing": {"mode": layout.recomputation},
    }
