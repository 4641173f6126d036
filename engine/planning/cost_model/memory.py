"""Bytes of the fullest rank by kind, in closed form. What a whole plan knows exactly, a plan says instead.

With P the parameters of the fullest stage on a tensor rank and N data ranks, in 16 bits with fp32 masters and Adam:

    parameters   2 P, ZeRO 3: 2 P / N
    gradients    4 P (or the engine's width), ZeRO 2 and 3 that reduce every microbatch: / N
    optimizer    12 P (master and two moments), ZeRO 1 to 3: / N
    activations  what a token keeps x tokens of a microbatch x blocks of the rank x microbatches that are held
    buffers      logits in 16 and 32 bits with their gradient, one block that is recomputed, gathered blocks of ZeRO 3
    comm         buffers of the communication library
    slack        context of the device, and what the allocator cannot use of what it holds
"""

from dataclasses import dataclass, fields
from typing import NamedTuple

from engine.planning.cost_model.layout import EngineTraits, TrainingLayout
from engine.planning.cost_model.stages import StageShare, microbatches_held
from engine.planning.cost_model.workload import Workload

CONTEXT_BYTES = 1.0e9
"""Of the device and its libraries (assumed)."""
CHANNEL_BYTES = 0.25e9
"""Buffers of the communication library for each axis of several ranks (assumed)."""
LOGIT_HELD_BYTES = 12
"""Held for an element of the logits: in 16 bits, in 32, and the gradients of both."""
SLACK = 0.1
"""Of activations and buffers (assumed)."""


class BlockSample(NamedTuple):
    """What was counted of a few blocks on one tensor rank: bytes for a microbatch of one row, of an average block."""

    kept: float
    """That one more block keeps until its backward."""
    around: float
    """That live besides at the peak: of the first and last layers, or of a block that is recomputed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Bytes of a rank, by kind."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float
    communication: float
    slack: float

    @property
    def total(self) -> float:
        """Of all kinds."""
        return sum(float(getattr(self, entry.name)) for entry in fields(self))


def working_bytes(work: Workload, layout: TrainingLayout, again: float = 0.0) -> tuple[float, float, float]:
    """Bytes that one microbatch keeps in one block, of the logits, and of one block while it is recomputed.

    ``again``: part of the products that selective recomputation repeats, so that it does not keep them.
    """
    tokens = layout.micro * work.context / layout.cp
    least, kept = (work.keeps(mode).on(layout.tp, layout.sequence) * tokens for mode in ("full", layout.recomputation))
    kept = least + (1 - again) * (kept - least) if layout.recomputation == "selective" else kept
    logits = LOGIT_HELD_BYTES * tokens * work.vocabulary / layout.tp
    whole = work.keeps("none").on(layout.tp, layout.sequence) * tokens if layout.recomputation != "none" else 0.0
    return kept, logits, whole


def closed_memory(work: Workload, layout: TrainingLayout, traits: EngineTraits, stage: StageShare) -> RankMemory:
    """Bytes of the fullest rank."""
    share = layout.dp * layout.cp
    held = (stage.blocks * work.block_parameters + stage.outer_parameters) / layout.tp
    kept, logits, again = working_bytes(work, layout, traits.products_again)
    gathered = 2 * 2 * work.block_parameters / layout.tp if layout.stage == 3 and share > 1 else 0.0
    last = logits if layout.pp == 1 else logits * (stage.outer_parameters > 0)
    activations = kept * stage.blocks * microbatches_held(layout)
    buffers = max(last, again) + gathered
    axes = sum(size > 1 for size in (layout.dp, layout.tp, layout.pp, layout.cp))
    return RankMemory(
        parameters=2 * held / (share if layout.stage == 3 else 1),
        gradients=traits.gradient_bytes * held / (share if layout.keeps_gradient_shards else 1),
        optimizer=12 * held / (share if layout.stage else 1),
        activations=activations,
        buffers=buffers,
        communication=axes * CHANNEL_BYTES,
        slack=CONTEXT_BYTES + SLACK * (activations + buffers),
    )
