"""Table of the rules of context parallelism: the rules of tensor parallelism, with attention and losses over
positions."""

from types import MappingProxyType

from torch.nn import functional

from engine.parallel.context.attention import context_attention
from engine.parallel.context.losses import context_cross_entropy
from engine.parallel.tensor.global_tensor.context import GlobalTensorContext, PlainGradient, Rules
from engine.parallel.tensor.global_tensor.rules.table import TENSOR_RULES
from engine.parallel.tensor.tp_axis import TensorAxis

CONTEXT_RULES = Rules(
    by_function=MappingProxyType({
        **TENSOR_RULES.by_function,
        functional.scaled_dot_product_attention: context_attention,
        functional.cross_entropy: context_cross_entropy,
    }),
    fallback=TENSOR_RULES.fallback,
)  # fmt: skip


class ContextOfSequences(GlobalTensorContext):
    """Context of the global tensors that are sharded along positions over the axis "cp"."""

    plain = PlainGradient.PARTIAL

    def __init__(self, axis: TensorAxis) -> None:
        super().__init__(axis, CONTEXT_RULES)
