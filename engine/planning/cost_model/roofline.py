"""Seconds of a rank's computation: for each class of operators the longer of its FLOPs and its bytes.

    product     FLOPs / (peak x product share x w / (w + half)), w the narrower side of what the rank multiplies,
                or the bytes of its weights and activations, whichever takes longer
    attention   executed FLOPs / (peak x attention share)
    pass        bytes / (memory rate x memory share)

A backward takes twice the products and passes, and 2.5 times the attention (its scores are computed again).
"""

from dataclasses import dataclass

from engine.planning.cost_model.hardware import GpuSpec
from engine.planning.cost_model.layout import EngineTraits, TrainingLayout
from engine.planning.cost_model.workload import Product, Workload

LOGIT_BYTES = 18
"""Moved for an element of the logits in forward and backward, 16 and 32 bits of it, by a fused loss."""
SCORE_BYTES = 12
"""Moved for each score of attention that is not computed in blocks: written, masked, normalized, dropped, read."""
UPDATE_BYTES = 34
"""Moved for each element that Adam updates: gradient, master, two moments read and three written, weight, norm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSeconds:
    """Of one block and microbatch on one rank, by class."""

    products: float
    attention: float
    passes: float

    @property
    def forward(self) -> float:
        """Of the forward."""
        return self.products + self.attention + self.passes

    @property
    def backward(self) -> float:
        """Of the backward, without what is recomputed."""
        return 2 * self.products + 2.5 * self.attention + 2 * self.passes


class Roofline:
    """A workload in a layout on a GPU."""

    def __init__(self, workload: Workload, layout: TrainingLayout, gpu: GpuSpec, traits: EngineTraits) -> None:
        self._workload, self._layout, self._gpu, self._traits = workload, layout, gpu, traits
        self._tokens = layout.micro * workload.context / layout.cp

    def block(self) -> BlockSeconds:
        """The forward of a block."""
        work, layout, gpu = self._workload, self._layout, self._gpu
        flash = self._traits.flash
        executed = 4 * work.attention * work.context * (0.5 if work.causal and flash else 1.0)
        bytes_moved = (work.fused if self._traits.fused else work.passes).on(layout.tp, layout.sequence)
        bytes_moved += 0 if flash else SCORE_BYTES * work.heads * work.context / layout.tp
        return BlockSeconds(
            products=sum(self.product(product, self._traits.fp8) for product in work.products),
            attention=executed * self._tokens / layout.tp / (gpu.bf16_rate * gpu.reached.attention),
            passes=bytes_moved * self._tokens / self.memory_rate,
        )

    def product(self, product: Product, fp8: bool = False) -> float:
        """Forward of a product."""
        gpu, tp = self._gpu, self._layout.tp if product.cut != "none" else 1
        width = product.narrow(tp)
        reached = width / (width + gpu.reached.product_half)
        rate = gpu.fp8_rate * gpu.reached.fp8 if fp8 else gpu.bf16_rate * gpu.reached.product
        flops = 2 * product.weights * self._tokens / tp
        moved = 2 * (product.weights / tp + self._tokens * (product.inner + product.outer) / max(1, tp))
        return max(flops / (rate * reached), moved / self.memory_rate)

    def head(self) -> float:
        """Head and loss, forward and backward."""
        work = self._workload
        logits = self._tokens * work.vocabulary / self._layout.tp * LOGIT_BYTES
        return 3 * sum(self.product(product) for product in work.head) + logits / self.memory_rate

    def recomputed(self, block: BlockSeconds) -> float:
        """What the backward of a block repeats of its forward."""
        mode = self._layout.recomputation
        if mode == "full":
            return block.forward
        return block.passes + self._traits.products_again * block.products if mode == "selective" else 0.0

    @property
    def memory_rate(self) -> float:
        """Bytes a second that passes over memory reach."""
        return self._gpu.memory_rate * self._gpu.reached.memory
