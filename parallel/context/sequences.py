"""Sequences of a model's forward: the rules of their global tensors, and the place where batch tensors become some.

A batch tensor is sharded at the first table or product that reads it, so masks, labels and position ids stay plain.
"""

from collections.abc import Iterable
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from engine.errors import EngineError
from engine.parallel.context.cuts import contiguous, zigzag
from engine.parallel.context.halo import HALO_RULES, POSITIONS
from engine.parallel.context.placed_rules import PLACED_RULES, SLICE_RULES, WrittenTensors, gathered_or_blank
from engine.parallel.context.relay import Relay
from engine.parallel.context.rules import context_attention, context_cross_entropy
from engine.parallel.context.scans import LAYER_RULES
from engine.parallel.tensor.global_tensor.context import GlobalTensorContext, PlainGradient, Rules
from engine.parallel.tensor.global_tensor.global_tensor import Function, GlobalTensor
from engine.parallel.tensor.global_tensor.operands import cut_operand_as
from engine.parallel.tensor.global_tensor.rules.table import TENSOR_RULES
from engine.parallel.tensor.tp_axis import TensorAxis

CONTEXT_RULES = Rules(
    by_function=MappingProxyType({
        **TENSOR_RULES.by_function,
        **HALO_RULES,
        **SLICE_RULES,
        **LAYER_RULES,
        functional.scaled_dot_product_attention: context_attention,
        functional.cross_entropy: context_cross_entropy,
    }),
    fallback=gathered_or_blank,
)  # fmt: skip


class ContextOfSequences(GlobalTensorContext):
    """Context of the global tensors that are sharded along positions over the axis "cp"."""

    plain = PlainGradient.PARTIAL

    def __init__(self, axis: TensorAxis, in_blocks: bool = False) -> None:
        super().__init__(axis, CONTEXT_RULES)
        self.shard = contiguous if in_blocks else zigzag
        """Function (length, ranks) that returns the positions of each rank."""
        self.relay, self.placed = Relay(axis), PLACED_RULES
        self.written = WrittenTensors()
        self._age = 0

    def next_age(self) -> int:
        """Returns the number of the next slice that one rank has."""
        self._age += 1
        return self._age

    def clear(self) -> None:
        """Drops what belongs to one forward."""
        super().clear()
        self.relay.clear()


class SequenceEntry(TorchFunctionMode):
    """Mode of a model's forward: shards the batch tensors that tables and products read.

    Token ids [.., S] of an embedding are sharded along the last dim, rows [.., S, H] of a product along the dim before
    the last one. Other uses of batch tensors read them in full.
    """

    def __init__(self, context: ContextOfSequences, batch: Iterable[Tensor]) -> None:
        super().__init__()
        self._context, self.found = context, 0
        self._memory = {tensor.untyped_storage().data_ptr() for tensor in batch if tensor.numel()}

    def __torch_function__(self, func: Function, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READERS and args and self._is_given(args[0], least := _READERS[func]):
            args = (self._sharded(args[0], args[0].ndim - 1 if least == 1 else args[0].ndim - 2), *args[1:])
        return func(*args, **(kwargs or {}))

    def _is_given(self, tensor: Any, least: int) -> bool:
        if type(tensor) is not Tensor or tensor.ndim < least or tensor.requires_grad:
            return False
        return tensor.untyped_storage().data_ptr() in self._memory

    def _sharded(self, tensor: Tensor, dim: int) -> GlobalTensor:
        ranks, length = self._context.axis.size, tensor.shape[dim]
        if length < 2 * ranks:
            raise EngineError(
                f"a sequence of {length} positions (dim {dim} of a batch tensor of shape {list(tensor.shape)}) with "
                f"parallel.context {ranks}: every context rank computes two runs of a sequence; pass at least "
                f"{2 * ranks} positions, or set parallel.context to at most {max(1, length // 2)}."
            )
        index = self._context.find((POSITIONS, length), lambda: self._context.shard(length, ranks))
        sets = tuple(index if place == dim else None for place in range(tensor.ndim))
        self.found += 1
        return GlobalTensor(cut_operand_as(self._context, tensor, sets), tuple(tensor.shape), sets, self._context)


_READERS = {functional.embedding: 1, torch.embedding: 1, functional.linear: 3, torch.matmul: 3}
"""Functions that read a sequence, with the least number of dims of their input."""
