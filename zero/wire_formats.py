"""Choice of the buckets and steps with quantized traffic, used by both the plan and the run.

Quantized gradients are sent to their owner by an all-to-all; in two hops, each with its own quantization, if the data
ranks are on several nodes:

    node 0: ranks 0 1   node 1: ranks 2 3          shard k belongs to rank k
    within nodes     0 -> 1: shards 1 and 3        1 -> 0: shards 0 and 2       messages of two shards, in the node
    across nodes     0 -> 2: shard 2               2 -> 0: shard 0              messages of one, summed over the node

Gradients of experts are sent in one hop. Buckets of fp64 or integers, exact buckets, and those of one rank are not
quantized.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from engine.kernels.codecs.block_codec import ENCODED_DTYPES, BlockFormat
from engine.parallel.comm.traffic import Traffic, sent_bytes
from engine.parallel.grid import Axis, Spread
from engine.zero.layout import ALIGNMENT, Bucket

_ENCODED = frozenset(str(dtype).removeprefix("torch.") for dtype in ENCODED_DTYPES)


@dataclass(frozen=True, slots=True)
class ReductionHop:
    """One of the all-to-alls that form a quantized gradient reduction: over all ranks, within nodes, or across
    nodes.
    """

    label: str
    ranks: int
    """Number of ranks that exchange messages."""
    shards: int
    """Number of shards in a message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WireFormats:
    """Quantization formats of weights and gradients sent between data ranks, and the topology of these ranks."""

    ranks: int = 1
    """Number of data ranks in a shard group."""
    within: int = 1
    """Number of these ranks on one node; ``ranks`` if all are, or if unknown."""
    axis: Axis = ""
    """Axis of the ranks that share a shard group."""
    weights: BlockFormat | None = None
    weight_dtypes: frozenset[str] = _ENCODED
    """Dtypes of buckets with encoded weights."""
    gradients: BlockFormat | None = None
    feedback: bool = False
    """True if encoding errors of gradients are added to the next gradients."""

    @property
    def any(self) -> bool:
        """True if weights or gradients are quantized."""
        return self.weights is not None or self.gradients is not None

    @property
    def alignment(self) -> int:
        """Alignment of parameters in a bucket, in elements. With quantization, each parameter starts a new block."""
        return max([ALIGNMENT, *(wire.block for wire in (self.weights, self.gradients) if wire is not None)])

    def of_weights(self, bucket: Bucket) -> BlockFormat | None:
        """Returns the quantization format for the all-gather of ``bucket``; None: the weights are sent unencoded."""
        return self.weights if bucket.dtype in self.weight_dtypes & _ENCODED and _encodable(bucket) else None

    def of_gradients(self, bucket: Bucket) -> BlockFormat | None:
        """Returns the quantization format for the gradient reduction of ``bucket``; None: the gradients are sent
        unencoded.
        """
        return self.gradients if bucket.dtype in _ENCODED and _encodable(bucket) else None

    def over(self, spread: Spread) -> "WireFormats":
        """Returns the formats for buckets that are sharded over the axis ``spread.sharding``.

        For an axis other than this object's ``axis``, gradients are reduced in one all-to-all over ``spread.ranks``
        ranks.
        """
        if spread.sharding == self.axis or not self.axis:
            return self
        return replace(self, ranks=spread.ranks, within=spread.ranks, axis=spread.sharding)

    @property
    def hops(self) -> tuple[ReductionHop, ...]:
        """All-to-alls of a quantized reduction, in order: one over all ranks, or one within nodes and then one across
        nodes.
        """
        nodes = self.ranks // self.within
        if nodes == 1 or self.within == 1:
            return (ReductionHop("gradients", self.ranks, 1),)
        inside = ReductionHop("gradients within nodes", self.within, nodes)
        return inside, ReductionHop("gradients across nodes", nodes, 1)

    def members(self, hop: int, index: int) -> tuple[int, ...]:
        """Returns the ranks that exchange messages with the rank ``index`` in all-to-all number ``hop`` of a reduction.
        The rank itself is included. The order is the order of summation. Ranks are indices along ``axis``.
        """
        first = index - index % self.ranks
        if len(self.hops) == 1:
            return tuple(range(first, first + self.ranks))
        node, place = divmod(index, self.within)
        if hop == 0:
            return tuple(range(node * self.within, (node + 1) * self.within))
        return tuple(range(first + place, first + self.ranks, self.within))

    def gathered_bytes(self, bucket: Bucket, itemsize: int) -> int:
        """Returns the bytes of all ranks' messages in one all-gather of ``bucket``. ``itemsize``: bytes of an
        unquantized element.
        """
        wire = self.of_weights(bucket)
        if wire is None:
            return bucket.elements * itemsize
        ranks = bucket.spread.ranks
        return ranks * wire.message_bytes(bucket.elements // ranks)

    def reduction(self, bucket: Bucket, itemsize: int) -> Iterator[Traffic]:
        """Yields the traffic that this rank sends in one gradient reduction of ``bucket``: one entry for each
        all-to-all, or for the reduce-scatter of unquantized gradients. ``itemsize``: bytes of an unquantized element.
        """
        wire, formats = self.of_gradients(bucket), self.over(bucket.spread)
        if wire is None:
            sent = sent_bytes("reduce_scatter", bucket.elements * itemsize, formats.ranks)
            yield Traffic(formats.axis, "gradients", 1, sent)
            return
        message = wire.message_bytes(bucket.elements // formats.ranks)
        for hop in formats.hops:
            sent = sent_bytes("all_to_all", hop.ranks * hop.shards * message, hop.ranks)
            yield Traffic(formats.axis, hop.label, 1, sent)

    def residual_elements(self, bucket: Bucket) -> int:
        """Returns the number of fp32 values that a rank stores for encoding errors of the bucket's gradients. It is 0
        without error feedback or quantization.
        """
        if not self.feedback or self.of_gradients(bucket) is None:
            return 0
        formats = self.over(bucket.spread)
        return sum(hop.ranks * hop.shards for hop in formats.hops) * (bucket.elements // formats.ranks)


def _encodable(bucket: Bucket) -> bool:
    return not bucket.exact and bucket.spread.ranks > 1
