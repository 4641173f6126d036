"""Sequences of a model's forward: the rules of their global tensors, and the place where batch tensors become some.

A batch tensor is sharded at the first table or product that reads it, so masks, labels and position ids stay plain.
"""

import logging
from collections.abc import Hashable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional

from engine.errors import EngineError
from engine.kernels.ops.embedding import look_up_rows
from engine.kernels.ops.flex_attention import attend_flex
from engine.kernels.ops.linear import linear as fused_linear
from engine.parallel.context.balance import WorkBalance, by_work, work_balance
from engine.parallel.context.choose import ASSUMED, AttentionRates, Method
from engine.parallel.context.cuts import contiguous, zigzag
from engine.parallel.context.methods import AttendingContext, context_attention, context_flex
from engine.parallel.context.recurrence.halo import HALO_RULES, POSITIONS
from engine.parallel.context.recurrence.placed_rules import (
    PLACED_RULES,
    SLICE_RULES,
    WrittenTensors,
    gathered_or_blank,
)
from engine.parallel.context.recurrence.relay import Relay
from engine.parallel.context.recurrence.scans import LAYER_RULES
from engine.parallel.context.repeated_heads import noted_expand, noted_repeat, noted_reshape
from engine.parallel.context.rows.functions import FUNCTION
from engine.parallel.context.rules import context_cross_entropy
from engine.parallel.model.operand_casts import QuietMode
from engine.parallel.tensor.global_tensor.context import PlainGradient, Rules
from engine.parallel.tensor.global_tensor.global_tensor import Function, GlobalTensor
from engine.parallel.tensor.global_tensor.index_sets import Index, Indices, Sets
from engine.parallel.tensor.global_tensor.operands import cut_operand_as
from engine.parallel.tensor.global_tensor.rules.table import TENSOR_RULES
from engine.parallel.tensor.layers.position_layer import layer_input
from engine.parallel.tensor.tp_axis import TensorAxis
from engine.parallel.trace.torch_function import METADATA

logger = logging.getLogger("trine")

CONTEXT_RULES = Rules(
    by_function=MappingProxyType({
        **TENSOR_RULES.by_function,
        **HALO_RULES,
        **SLICE_RULES,
        **LAYER_RULES,
        functional.scaled_dot_product_attention: context_attention,
        attend_flex: context_flex,
        functional.cross_entropy: context_cross_entropy,
        Tensor.expand: noted_expand,
        Tensor.reshape: noted_reshape,
        torch.reshape: noted_reshape,
        Tensor.repeat_interleave: noted_repeat,
        torch.repeat_interleave: noted_repeat,
    }),
    fallback=gathered_or_blank,
)  # fmt: skip


class ContextOfSequences(AttendingContext):
    """Settings and caches for functions on global tensors (like DTensors) sharded along positions over axis cp.

    It also stores rules for torch functions on these tensors, and the positions of each rank in the present forward.
    """

    plain = PlainGradient.PARTIAL

    def __init__(
        self, axis: TensorAxis, method: Method | Literal["auto"] = "auto", unit: int = 1, in_blocks: bool = False,
        rates: AttentionRates = ASSUMED,
    ) -> None:  # fmt: skip
        super().__init__(axis, CONTEXT_RULES, method, rates)
        self.unit = unit
        """Divisor of the number of positions of each rank: tensor ranks shard them under sequence parallelism."""
        self.shard = contiguous if in_blocks else zigzag
        """Function (length, ranks, unit) that returns the positions of each rank."""
        self.relay, self.placed = Relay(axis), PLACED_RULES
        self.written = WrittenTensors()
        self._age = 0
        self._unpacked: dict[Hashable, Any] | None = None
        """Cache of batches without packed documents, while that of a batch with documents is in use."""
        self.shared: Mapping[int, Index] = {}
        """Positions of each rank in packed documents of this forward, by length."""
        self.running = False
        """True inside a forward; a recomputation in backward is not."""
        self._is_noted = False

    def begin(self, given: Mapping[int, Indices], sharing: bool = True) -> None:
        """Begins a forward, and drops values cached for the packed documents of the last batch.

        ``given``: for each length of packed sequences, the number of (query, key) pairs of the query at each position.
        ``sharing``: True to shard packed sequences such that ranks have nearly equal numbers of pairs.
        """
        self.work = given
        work = given if sharing else {}
        if work or self._unpacked is not None:
            kept = self._found if self._unpacked is None else self._unpacked
            proven = {key: value for key, value in self._found.items() if _begins_with(key, FUNCTION)}
            self._found, self._unpacked = {**kept, **proven}, kept if work else None
        for key in [key for key in self._found if _begins_with(key, POSITIONS)]:
            del self._found[key]
        ranks, unit = self.axis.size, self.unit
        self.shared = {
            length: by_work(pairs, ranks, unit)
            for length, pairs in work.items()
            if length >= 2 * ranks * unit and length % unit == 0
        }

    def positions_of(self, length: int) -> Index:
        """Returns the positions that each rank stores of a sequence of ``length`` positions in this forward."""
        made = self.shared.get(length) or self._plain(length)
        return self.find((POSITIONS, length), lambda: made)

    def _plain(self, length: int) -> Index:
        """Returns the positions of each rank without packed documents, as the same object in all forwards."""
        return self.find(("shard", length), lambda: self.shard(length, self.axis.size, self.unit))

    def current(self, sets: Sets) -> Sets:
        """Converts ``sets``, a sharding in forwards without packed documents, to the sharding in this forward.

        The sharding of a dim changes only if it is as long as sequences of packed documents in this forward.
        """
        if not self.running:
            return sets
        return tuple(
            self.shared[index.size] if index is not None and self._is_shared(index) else index for index in sets
        )

    def is_plain(self, sets: Sets) -> bool:
        """Returns True if each sharded dim in ``sets`` is sharded like this batch's sequences of that length."""
        return all(index is None or index == self.found((POSITIONS, index.size)) for index in sets)

    def _is_shared(self, index: Index) -> bool:
        return index.size in self.shared and index == self._plain(index.size)

    @property
    def balance(self) -> WorkBalance:
        """Attention work of each rank in this forward's packed documents; empty without packed documents."""
        every = [work_balance(work, self.positions_of(length)).pairs for length, work in self.work.items()]
        return WorkBalance(tuple(map(sum, zip(*every, strict=True))))

    def note_unshared(self) -> None:
        """Warns that attention work is not divided evenly over ranks, if this forward has packed documents.

        Only the first context rank logs it, once.
        """
        if self.work and not self._is_noted and not self.axis.index:
            logger.warning(
                "parallel.context: packed documents keep two chunks a rank, because this model reads neighbouring "
                "positions and its forwards are called by a script; eng.train_batch shares them by work"
            )
            self._is_noted = True

    def next_age(self) -> int:
        """Returns the number, from 1, of the next slice, such as ``x[:, t]``, that a single rank stores."""
        self._age += 1
        return self._age

    def clear(self) -> None:
        """Drops a forward's cached values and order of messages between ranks; call it at the end of the forward."""
        super().clear()
        self.relay.clear()


def _begins_with(key: Hashable, word: str) -> bool:
    return isinstance(key, tuple) and key[0] == word


class SequenceEntry(QuietMode):
    """Function mode that shards tensors of the batch along positions for functions that read them.

    Embeddings and matrix products read shards of token ids [.., S] and rows [.., S, H]; all functions except ``conv1d``
    read shards of embeddings [B, S, H]. S: positions, H: hidden size. Otherwise, functions read the full batch tensors.

    Lookups of positions in a table of learned positions return the rows of this rank's positions alone.
    """

    def __init__(self, context: ContextOfSequences, batch: Iterable[Tensor]) -> None:
        super().__init__()
        self._context, self.found = context, 0
        self._memory: dict[int, StorageWeakRef] = {}
        """Memory of the batch by address; a recomputation in backward may find other tensors at these addresses."""
        for tensor in batch:
            self._give(tensor)

    def __torch_function__(self, func: Function, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        place = 1 if func is look_up_rows else 0
        if func not in METADATA and len(args) > place and self._is_given(args[place]):
            given = args[place]
            dim = _sequence_dim(func, given)
            if dim is not None:
                args = (*args[:place], self._sharded(given, dim), *args[place + 1 :])
                if func is layer_input:
                    return args[0]
            elif not given.is_floating_point() and func not in _TABLES:
                return self._followed(given, func(*args, **(kwargs or {})))
        if func in _TABLES and len(args) > place and (ids := self._positions(args[place])) is not None:
            args = (*args[:place], ids, *args[place + 1 :])
        return func(*args, **(kwargs or {}))

    def _followed(self, given: Tensor, made: Any) -> Any:
        """Returns ``made``, which may be other token ids of the batch's sequence, such as ids shifted by one."""
        if type(made) is Tensor and made.dtype == given.dtype and made.shape == given.shape:
            self._give(made)
        return made

    def _give(self, tensor: Tensor) -> None:
        if tensor.numel():
            memory = tensor.untyped_storage()
            self._memory[memory.data_ptr()] = StorageWeakRef(memory)  # type: ignore[no-untyped-call]

    def _positions(self, ids: Any) -> GlobalTensor | None:
        """Returns this rank's part of positions [S] or [B, S] that a table reads, if a sequence has their length.

        Distances [S, S] of queries and keys are read in full.
        """
        if type(ids) is not Tensor or not 0 < ids.ndim < 3 or ids.is_floating_point():
            return None
        index: Index | None = self._context.found((POSITIONS, ids.shape[-1]))
        if index is None or (ids.ndim == 2 and self._context.found((POSITIONS, ids.shape[0])) is not None):
            return None
        sets = (*(None,) * (ids.ndim - 1), index)
        return GlobalTensor(cut_operand_as(self._context, ids, sets), tuple(ids.shape), sets, self._context)

    def _is_given(self, tensor: Any) -> bool:
        if type(tensor) is not Tensor:
            return False
        try:
            memory = self._memory.get(tensor.untyped_storage().data_ptr())
        except NotImplementedError:  # places of a mask's function under vmap have no memory
            return False
        return memory is not None and not memory.expired()  # type: ignore[no-untyped-call]

    def _sharded(self, tensor: Tensor, dim: int) -> GlobalTensor:
        ranks, unit, length = self._context.axis.size, self._context.unit, tensor.shape[dim]
        given = f"a sequence of {length} positions (dim {dim} of a batch tensor of shape {list(tensor.shape)})"
        if length < 2 * ranks * unit:
            raise EngineError(
                f"{given} is too short for parallel.context {ranks}, because each context rank computes two pieces of "
                f"at least {unit} position{'s' * (unit > 1)}; pass at least {2 * ranks * unit} positions, or set "
                f"parallel.context to at most {max(1, length // (2 * unit))}."
            )
        if length % unit:
            raise EngineError(
                f"{given} does not divide among {unit} tensor ranks, as sequence_parallel requires; pad it to a "
                f"multiple of {unit}, or set parallel.sequence_parallel to false."
            )
        index = self._context.positions_of(length)
        sets = tuple(index if place == dim else None for place in range(tensor.ndim))
        self.found += 1
        local = cut_operand_as(self._context, tensor, sets)
        if self._is_given(local):  # a layer that reads this rank's positions would shard them again
            local = local.clone()
        return GlobalTensor(local, tuple(tensor.shape), sets, self._context)


_READERS = frozenset((
    functional.embedding, torch.embedding, look_up_rows, functional.linear, fused_linear, torch.matmul, layer_input,
))  # fmt: skip
"""Functions that read token ids [.., S] or rows [.., S, H] of a sequence."""
_TABLES = frozenset((functional.embedding, look_up_rows))
_OF_CHANNELS = frozenset((functional.conv1d, torch.conv1d))
"""Functions that read [B, C, S]."""


def _sequence_dim(func: Function, given: Tensor) -> int | None:
    """Returns the dim of a batch tensor that is a sequence, if ``func`` reads it as one.

    Token ids are sharded by the functions of ``_READERS``, and embeddings [B, S, H] by any function. One number or
    vector for each row of the batch, such as the number of a speaker, is no sequence.
    """
    if not given.is_floating_point():
        dim, reads = given.ndim - 1, given.ndim > 1 and func in _READERS
    else:
        dim = given.ndim - 2
        reads = (given.ndim >= 3 and func in _READERS) or (given.ndim == 3 and func not in _OF_CHANNELS)
    return dim if reads and given.shape[dim] > 1 else None
