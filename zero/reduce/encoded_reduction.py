"""Quantized reduction of a bucket's gradients over axis dp, from every rank to the owner of each shard.

    gradients [N, s] + residual -> codes [N, m] -> all-to-all -> decode, add in fp32 in the order of ranks -> shard [s]

On several nodes the sum is first made within the node, for all shards that ranks of the same place own, and then
encoded again and sent across (``zero/wire_formats``; Wang et al. 2023, ZeRO++). Every contribution is encoded, this
rank's own too, so that the sum is the same whoever owns the shard.

Error feedback (Seide et al. 2014; Karimireddy et al. 2019): the rounding error of an encoding, the residual, is added
to the next gradients. The sum of the messages over steps then differs from the sum of the true gradients by one
residual, at most half a scale, however many steps there are.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from engine.kernels.codecs.block_codec import BlockCodec, BlockFormat
from engine.kernels.dispatch import Kernels
from engine.parallel.comm.comm import Comm, Pending
from engine.parallel.comm.encoded_collectives import sum_messages
from engine.zero.flat_buckets import FlatBucket
from engine.zero.wire_formats import WireFormats


class EncodedReduction:
    """Reduce-scatter of one bucket's gradients over the data ranks, with quantized messages (as in ZeRO++).

    It takes one all-to-all over all data ranks, or two on several nodes: within each node, then across nodes. Shape
    suffixes: N data ranks, W of them in a node, A nodes, s elements of a shard, m bytes of an encoded shard.

    Args:
        comm: sends these all-to-alls over dp, each with its own label.
    """

    def __init__(self, flat: FlatBucket, wire: BlockFormat, formats: WireFormats, comm: Comm, kernels: Kernels) -> None:
        self._codec, self._comm, self._hops = BlockCodec(wire, kernels), comm, formats.hops
        self._ranks, self._size = formats.ranks, flat.bucket.elements // formats.ranks
        self._line = comm.grid.shard_line if formats.axis == comm.grid.sharding else formats.axis
        self._members = [formats.members(hop, comm.grid.index(self._line)) for hop in range(len(self._hops))]
        self.residuals: tuple[Tensor, ...] = ()
        """Residuals of the last encoding of each hop, fp32 [rows, s]; empty without error feedback."""
        if formats.feedback:
            rows = [hop.ranks * hop.shards for hop in self._hops]
            self.residuals = tuple(torch.zeros(count, self._size, device=flat.params.device) for count in rows)

    def start(self, full: Tensor, out: Tensor) -> Pending:
        """Starts the sum of ``full`` [N*s] over the N data ranks into ``out`` [s], this rank's shard; returns a handle.
        The caller may overwrite ``full`` immediately.

        All ranks must wait for the handles of their buckets in the same order, because a wait may send the second
        all-to-all (across nodes).
        """
        messages = self._encode(full.view(self._ranks, -1), 0)
        if len(self._hops) == 1:
            return self._send(messages, 0, out)
        within, nodes = self._hops[0].ranks, self._hops[0].shards
        given_WAm = messages.view(nodes, within, -1).transpose(0, 1).contiguous()
        received_WAm = torch.empty_like(given_WAm)
        pending = self._comm.all_to_all(received_WAm, given_WAm, self._members[0], self._hops[0].label, self._line)
        return pending.then(partial(self._cross, received_WAm, out))

    def _cross(self, received_WAm: Tensor, out: Tensor) -> None:
        """Adds the messages of the node, and sends the sum on to the owners on all nodes."""
        sums_As = out.new_empty((self._hops[0].shards, self._size), dtype=torch.float32)
        for sums_s, received_Wm in zip(sums_As, received_WAm.transpose(0, 1).contiguous(), strict=True):
            self._codec.add(received_Wm, sums_s)
        self._send(self._encode(sums_As, 1), 1, out).wait()

    def _encode(self, values: Tensor, hop: int) -> Tensor:
        residual = self.residuals[hop] if self.residuals else None
        return self._codec.encode(values, residual)

    def _send(self, given_Rm: Tensor, hop: int, out: Tensor) -> Pending:
        members, label = self._members[hop], self._hops[hop].label
        exchange = partial(self._comm.all_to_all, members=members, label=label, axis=self._line)
        return sum_messages(given_Rm, out, self._codec, exchange)


def encoded_reductions(
    buckets: Sequence[FlatBucket], formats: WireFormats, comm: Comm, kernels: Kernels
) -> dict[int, EncodedReduction]:
    """Returns bucket index -> :class:`EncodedReduction`, for each bucket with gradients that ``formats`` quantizes."""
    found: dict[int, EncodedReduction] = {}
    for flat in buckets:
        wire = formats.of_gradients(flat.bucket)
        if wire is not None:
            found[flat.bucket.index] = EncodedReduction(flat, wire, formats.over(flat.bucket.spread), comm, kernels)
    return found


def connect_hops(formats: WireFormats, comm: Comm) -> None:
    """Creates the process groups for all hops (all-to-alls) of quantized gradient reductions. Every rank of the world
    must call it.
    """
    ranks = comm.grid.size(comm.grid.shard_line)
    if formats.gradients is None or (len(formats.hops) == 1 and formats.ranks == ranks):
        return
    for hop in range(len(formats.hops)):
        for members in sorted({formats.members(hop, index) for index in range(ranks)}):
            comm.connect_data(members)
