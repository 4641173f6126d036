"""Embedding and head with the vocabulary sharded over the axis "tp" (Megatron-LM, Shoeybi et al. 2019, section 3).

A vocabulary that the axis does not divide is sharded almost evenly; nothing is padded.

Shape suffixes: V the vocabulary, W this rank's shard of it, D width.
"""

from typing import Any

import torch
from torch import Tensor, nn

from engine.errors import EngineError
from engine.kernels.device import is_host
from engine.parallel.tensor.collectives import EMBEDDING, gather_last, reduce_from
from engine.parallel.tensor.deferred_linear import fused_forward, is_conv1d, only_argument
from engine.parallel.tensor.global_tensor.context import GlobalTensorContext
from engine.parallel.tensor.global_tensor.global_tensor import GlobalTensor
from engine.parallel.tensor.global_tensor.redistribute import add_rows, full, stream_dim
from engine.parallel.tensor.global_tensor.rules.table import global_context
from engine.parallel.tensor.layers.linear import has_plain_forward, is_replaced, keep_rows
from engine.parallel.tensor.logits.logit_shard import Vocabulary
from engine.parallel.tensor.logits.sharded_logits import ShardedLogits
from engine.parallel.tensor.overlap.async_input_grad import Entrance, enter_region, share_input
from engine.parallel.tensor.plan.ranges import cut_unevenly
from engine.parallel.tensor.plan.sharding_rules import check_embedding
from engine.parallel.tensor.tp_axis import TensorAxis


class EmbeddingLayer(nn.Module):
    """Embedding with vocabulary rows sharded over "tp": ids int64 [..] -> vectors [.., D], summed over "tp".

    The sum is an all-reduce, label "embedding", or under sequence parallelism a reduce-scatter along the sequence.

    Raises:
        EngineError: an id is outside the vocabulary, on the CPU; a GPU raises its own assertion.
    """

    tensor_vocabulary: Vocabulary
    tensor_context: GlobalTensorContext
    tensor_plain = False
    """True if the layer's own forward is that of ``nn.Embedding``."""

    def forward(self, *given: Tensor, **named: Tensor) -> Tensor:
        """Returns the vectors of the only argument, ids [..]: this rank's rows, with zeros for all other ids, summed
        over "tp"."""
        ids = only_argument(given, named)
        vocabulary = self.tensor_vocabulary
        if not vocabulary.axis.dry:
            _check_ids(ids, vocabulary.size)
        local = ids - vocabulary.start
        elsewhere = (local < 0) | (local >= vocabulary.width)
        x_D = super().forward(local.masked_fill_(elsewhere, 0))
        # in place only in memory that the layer's own forward does not keep for its backward
        zeroed = x_D.masked_fill_ if self.tensor_plain else x_D.masked_fill
        x_D = zeroed(elsewhere.unsqueeze(-1), 0)
        if self.tensor_context.sequence and x_D.dim() > 2:
            return add_rows(self.tensor_context, x_D, label=EMBEDDING)
        return reduce_from(x_D, vocabulary.axis, EMBEDDING)


def _check_ids(ids: Tensor, size: int) -> None:
    """Refuses ids outside the vocabulary, as one process does; otherwise all ranks would return zeros for them."""
    inside = ((ids >= 0) & (ids < size)).all()
    if torch.compiler.is_compiling() or not (is_host(ids.device) or ids.is_meta):
        torch._assert_async(inside)
    elif is_host(ids.device) and not bool(inside):
        raise EngineError(
            f"a token id is outside the vocabulary of {size} rows: the ids of this batch reach from {int(ids.min())} "
            f"to {int(ids.max())}; pass ids from 0 to {size - 1}."
        )


class HeadLayer(nn.Module):
    """Output head with vocabulary rows sharded over "tp": x [.., D], equal on all ranks -> sharded logits [.., V].

    Forward communicates nothing; backward sums the gradient of x over "tp" (label "column inputs").
    """

    tensor_vocabulary: Vocabulary
    tensor_owned: bool
    tensor_joined = False
    """True if a PEFT layer around this one communicates for it and for its pairs."""

    def forward(self, *given: Tensor, **named: Tensor) -> Tensor:
        """Computes this rank's columns of the logits of the only argument, x [.., D]; returns them as sharded
        logits."""
        x_D = only_argument(given, named)
        if self.tensor_joined:
            return self.multiply(x_D)
        plain = [self] if self.tensor_owned else []
        return self.tensor_leave(share_input(*self.entrance(x_D), plain).multiply(self))

    def tensor_enter(self, x_D: Tensor) -> Tensor:
        """Returns ``x_D``, gathered over "tp" if sharded along the sequence. Backward sums the gradient over "tp"."""
        return enter_region(*self.entrance(x_D))

    def tensor_leave(self, logits_W: Tensor) -> Tensor:
        """Returns ``logits_W``, this rank's W columns, as sharded logits.

        A dry run returns a plain tensor of the full shape.
        """
        vocabulary = self.tensor_vocabulary
        axis = vocabulary.axis
        if axis.dry:
            return gather_last(logits_W, vocabulary.widths, axis)
        return ShardedLogits.wrap(logits_W, vocabulary)

    def entrance(self, x_D: Tensor) -> tuple[Tensor, Entrance]:
        """Returns (plain tensor, settings), arguments of :func:`enter_region`, for a head with the input ``x_D``.

        If ``x_D`` is sharded along the sequence, the tensor is this rank's shard, and :func:`enter_region` gathers it
        over "tp". Otherwise the tensor is ``x_D`` in full.
        """
        dim = None
        if type(x_D) is GlobalTensor:
            dim = stream_dim(x_D)
            x_D = full(x_D, "head") if dim is None else x_D.local
        return x_D, Entrance(self.tensor_vocabulary.axis, self.tensor_owned, dim=dim)

    def multiply(self, x_D: Tensor) -> Tensor:
        """Returns this rank's columns of the logits: ``x_D`` times this rank's rows of the weight."""
        kernels = self.tensor_vocabulary.axis.kernels
        if self.tensor_owned and is_replaced(x_D, kernels):
            return fused_forward(self, x_D, "none", kernels)
        logits_W: Tensor = super().forward(x_D)
        return logits_W


class VocabularyEmbedding(EmbeddingLayer, nn.Embedding):
    """``nn.Embedding`` that stores only this rank's vocabulary rows of the table. The arguments are the sizes of the
    full table.

    Raises:
        PlanError: ``max_norm`` or another option that needs all rows at once is set.
    """

    def __init__(self, num_embeddings: int, embedding_dim: int, *, axis: TensorAxis, **options: Any) -> None:
        super().__init__(num_embeddings, embedding_dim, **options)
        check_embedding(self, "this VocabularyEmbedding")
        ranges = cut_unevenly(num_embeddings, axis.size)
        keep_rows(self, 0, ranges, axis.index)
        prepare_embedding(self, Vocabulary(axis, tuple(r.stop - r.start for r in ranges)))


class VocabularyHead(HeadLayer, nn.Linear):
    """``nn.Linear`` from hidden size to vocabulary size that stores only this rank's vocabulary rows of the weight. The
    arguments are the sizes of the full layer.
    """

    def __init__(self, in_features: int, vocabulary: int, bias: bool = False, *, axis: TensorAxis) -> None:
        super().__init__(in_features, vocabulary, bias)
        ranges = cut_unevenly(vocabulary, axis.size)
        keep_rows(self, 0, ranges, axis.index)
        prepare_head(self, Vocabulary(axis, tuple(r.stop - r.start for r in ranges)))


def prepare_embedding(module: nn.Module, vocabulary: Vocabulary, context: GlobalTensorContext | None = None) -> None:
    """Sets the attributes of an embedding that stores this rank's rows: vocabulary, row count and padding index.

    ``context``: context of the model's global tensors; None for a new context.
    """
    module.tensor_vocabulary = vocabulary  # type: ignore[assignment]
    module.tensor_context = context or global_context(vocabulary.axis)  # type: ignore[assignment]
    module.tensor_plain = has_plain_forward(module)  # type: ignore[assignment]
    module.num_embeddings = vocabulary.width  # type: ignore[assignment]
    padding: Any = module.padding_idx
    if padding is not None:
        local = padding - vocabulary.start
        module.padding_idx = local if 0 <= local < vocabulary.width else None  # type: ignore[assignment]


def prepare_head(module: nn.Module, vocabulary: Vocabulary) -> None:
    """Sets the attributes of a head that stores this rank's rows: vocabulary and number of outputs."""
    module.tensor_vocabulary = vocabulary  # type: ignore[assignment]
    module.tensor_owned = has_plain_forward(module)  # type: ignore[assignment]
    if is_conv1d(module):
        module.nf = vocabulary.width  # type: ignore[assignment]
    else:
        module.out_features = vocabulary.width  # type: ignore[assignment]
