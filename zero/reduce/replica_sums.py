"""Second hop of a reduction when ZeRO shards over part of the data axis: sums shards over the replicas.

    shard groups 0: ranks 0 1   1: ranks 2 3
    inside    reduce-scatter over dp_shard        0 and 2 have the first half, 1 and 3 the second one
    across    all-reduce over dp_replicate        0 + 2, 1 + 3: half of the bytes, once a step

All replicas of a shard get equal bits of the sum, so their optimizers make equal updates of it. (Zhang et al. 2022,
MiCS, 2-hop gradient synchronization; HSDP of PyTorch.)
"""

from collections.abc import Callable

from torch import Tensor

from engine.parallel.comm.comm import Comm, Pending
from engine.parallel.grid import Axis

OnWire = Callable[[Tensor], Tensor]
"""Function that returns gradients to send: the tensor itself, or a copy in the dtype of messages."""


class ReplicaSum:
    """Second hop of a gradient reduction in hybrid sharding (HSDP): an all-reduce of ``shard`` between the shard
    groups, after the reduction within each group.

    Args:
        inside: handle of the reduction within the group, which writes ``shard``.
        axis: axis of the ranks with the same shard; with one rank the sum is ``shard`` itself.
        comm: sends one all-reduce over ``axis``, label "gradients".
    """

    def __init__(self, inside: Pending, shard: Tensor, axis: Axis, comm: Comm, on_wire: OnWire) -> None:
        self._inside, self._shard, self._axis, self._comm, self._on_wire = inside, shard, axis, comm, on_wire
        self._across: Pending | None = None
        self._sent = shard

    def cross(self) -> None:
        """Waits for the reduction within the shard group, then starts the all-reduce over ``axis``. A second call does
        nothing.
        """
        if self._across is None:
            self._inside.wait()
            self._sent = self._on_wire(self._shard)
            self._across = self._comm.all_reduce(self._sent, self._axis, "gradients")

    def wait(self) -> None:
        """Waits until ``shard`` contains the sum over all shard groups; starts the all-reduce first if :meth:`cross`
        has not.
        """
        self.cross()
        assert self._across is not None
        self._across.wait()
        if self._sent is not self._shard:
            self._shard.copy_(self._sent)


def summed_over_replicas(
    inside: Pending, shard: Tensor, axis: Axis, comm: Comm, on_wire: OnWire
) -> tuple[Pending, ReplicaSum]:
    """Prepares the sum of ``shard`` over ``axis``, after the reduction within the shard group (handle ``inside``).
    Starts no all-reduce yet. ``on_wire``: converts ``shard`` to the dtype of messages; the sum is converted back.

    Returns (handle, :class:`ReplicaSum`). The handle's wait starts the all-reduce over ``axis``, unless
    :meth:`ReplicaSum.cross` has started it, and waits for the sum.
    """
    across = ReplicaSum(inside, shard, axis, comm, on_wire)
    return Pending().then(across.wait), across
