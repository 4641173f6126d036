"""Quantized gathers of weights: the owner sends codes, and every rank, the owner included, decodes them.

    ZeRO 3        kept [s] -> message [m] -> gathered [N, m] -> params [N*s]      whenever the bucket is gathered
    ZeRO 1 and 2  master [s] -> the same                                          after each update

So all data ranks compute with the same values, bit for bit, while the weights of the optimizer remain exact: the shard
at ZeRO 3, the master below. Parameters without a master (fp32) would be overwritten by their rounded values, and are
gathered as they are at ZeRO 1 and 2.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from engine.kernels.codecs.block_codec import BlockCodec
from engine.kernels.dispatch import Kernels
from engine.parallel.comm.comm import Comm, Pending
from engine.zero.flat_buckets import FlatBucket
from engine.zero.wire_formats import WireFormats


@dataclass(frozen=True, slots=True)
class EncodedGather:
    """All-gather of one bucket's weights as quantized codes: the bucket, its codec, and the buffers of the codes."""

    flat: FlatBucket
    codec: BlockCodec
    own: Tensor
    """Encoded shard of this rank, uint8 [m]."""
    full: Tensor
    """Encoded shards of all ranks, [N*m], valid after the all-gather."""

    def decode(self) -> None:
        """Decodes the received shards of all ranks into the bucket's full parameters, ``flat.params``. Call it after
        the all-gather.
        """
        ranks = self.full.numel() // self.own.numel()
        self.codec.decode(self.full.view(ranks, -1), self.flat.params.view(ranks, -1))


def encoded_gather(flat: FlatBucket, codec: BlockCodec, weights: Tensor, ranks: int) -> EncodedGather:
    """Encodes ``weights``, this rank's shard of the bucket ``flat``, and allocates the buffer for the codes of
    ``ranks`` ranks. The caller starts the all-gather.
    """
    own = codec.message(weights)
    return EncodedGather(flat, codec, own, own.new_empty(ranks * own.numel()))


def gather_masters(flat: FlatBucket, comm: Comm, label: str) -> Pending:
    """Starts the quantized all-gather of the bucket's fp32 masters into its parameters. ``flat.rounds_in_gathers`` must
    be True. ``label``: label of the traffic.
    """
    assert flat.master is not None and flat.codec is not None
    axis = flat.bucket.spread.sharding
    gather = encoded_gather(flat, flat.codec, flat.master.to(flat.params.device), comm.grid.size(axis))
    return comm.all_gather(gather.full, gather.own, axis, label).then(gather.decode)


def round_initial(buckets: Sequence[FlatBucket], comm: Comm) -> None:
    """Rounds the initial parameters by a quantized all-gather, so that a new run has the same weights as a resumed one.
    All-gathers the buckets for which ``rounds_in_gathers`` is True.
    """
    for flat in buckets:
        if flat.rounds_in_gathers:
            gather_masters(flat, comm, "parameters").wait()


def with_codecs(buckets: Sequence[FlatBucket], formats: WireFormats, kernels: Kernels) -> tuple[FlatBucket, ...]:
    """Returns the buckets, with a weight codec added to each bucket for which ``formats`` selects quantized
    all-gathers.
    """
    found = [(flat, formats.of_weights(flat.bucket)) for flat in buckets]
    return tuple(flat if wire is None else replace(flat, codec=BlockCodec(wire, kernels)) for flat, wire in found)
