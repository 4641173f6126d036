"""Secondary shards: gathered parameters, stored in parts by the data ranks of a node for the next gathers (hpZ).

    node 0: ranks 0 1   node 1: ranks 2 3
    kept       [ 0 | 1 | 2 | 3 ]         each rank a quarter; the first gather of a step goes over all of dp
    secondary  [   0   |   1   ]  [   2   |   3   ]
                 first   second     first   second half, in both nodes; all other gathers of the step stay in the node

A secondary shard is taken when a full bucket is freed for the first time, and lasts to the end of the step or the
evaluation, or until a user's write or a load. It has the values of the computation: decoded ones, if weights are
gathered in fewer bits. (Wang et al. 2023, ZeRO++, hierarchical partitioning.)
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch import Tensor

from engine.parallel.comm.comm import Comm, Pending
from engine.zero.flat_buckets import FlatBucket

WITHIN = "parameters within nodes"
"""Label of all-gathers from secondary shards."""


@dataclass(frozen=True, slots=True)
class SecondaryLayout:
    """Layout of secondary shards (ZeRO++ hpZ): the buckets that have them, and the number of data ranks that share a
    node.
    """

    ranks: int = 1
    """Number of neighbouring data ranks on a node; 1: no secondary shards."""
    buckets: frozenset[int] = frozenset()

    def elements(self, bucket_elements: int) -> int:
        """Returns the number of elements in one rank's secondary shard of a bucket of ``bucket_elements`` elements."""
        return bucket_elements // self.ranks


NO_SHARDS = SecondaryLayout()


class SecondaryShards:
    """Secondary shards of this rank, by bucket index (ZeRO++ hpZ). The data ranks of a node together store a copy of
    each bucket, so that repeated gathers stay within the node.

    Args:
        comm: sends all-gathers between the data ranks of a node, with the label "parameters within nodes".
    """

    def __init__(self, buckets: Sequence[FlatBucket], layout: SecondaryLayout, comm: Comm) -> None:
        self._buckets, self._ranks, self._comm = buckets, layout.ranks, comm
        self._place = comm.grid.index(comm.grid.shard_line) % layout.ranks
        self._shards: dict[int, Tensor] = {}
        for index in sorted(layout.buckets):
            params = buckets[index].params
            size = layout.elements(params.numel())
            self._shards[index] = params.new_zeros(size)
        self._valid: set[int] = set()

    @property
    def valid(self) -> frozenset[int]:
        """Indices of the buckets with secondary shards that contain the current parameters."""
        return frozenset(self._valid)

    @property
    def memory(self) -> tuple[Tensor, ...]:
        """Memory of all secondary shards, valid or not."""
        return tuple(self._shards.values())

    def take(self, index: int) -> None:
        """Copies this rank's slice of the gathered bucket ``index`` into its secondary shard. Does nothing if the shard
        is valid.
        """
        shard = self._shards.get(index)
        if shard is not None and index not in self._valid:
            shard.copy_(self._own(self._buckets[index]))
            self._valid.add(index)

    def gather(self, indices: Sequence[int]) -> Pending:
        """Starts the all-gather of the buckets ``indices`` within the node, in one batch. Their secondary shards must
        be valid.
        """
        pairs = [(self._buckets[index].params, self._shards[index]) for index in indices]
        return self._comm.gather_parameters(pairs, WITHIN, self._ranks)

    def drop(self, indices: Collection[int] | None = None) -> None:
        """Marks the secondary shards of the buckets ``indices`` (None: all buckets) as invalid, after a parameter
        change. The memory stays allocated.
        """
        self._valid.difference_update(self._shards if indices is None else indices)

    def _own(self, flat: FlatBucket) -> Tensor:
        return flat.params.view(self._ranks, -1)[self._place]
