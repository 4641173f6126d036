"""Faults of sharding over a part of the data axis."""

from tests.faults.fault import Fault

_TESTS = "tests/zero/test_shard_groups.py"
_PARITY = f"{_TESTS}::test_groups_train_as_one_process[zero0]"
_MICROBATCH = f"{_TESTS}::test_groups_train_as_one_process[zero4]"
_BYTES = f"{_TESTS}::test_gradients_cross_groups_once_a_step_as_shards[step-1]"
_STORED = "tests/engine/checkpoint/test_shard_groups.py"

SHARD_GROUPS = (
    Fault(
        name="shards-not-summed-across-groups",
        about="Every shard group trains on its own rows alone, and the groups drift apart.",
        file="zero/reduce/replica_sums.py",
        old='self._comm.all_reduce(self._sent, self._axis, "gradients")',
        new="Pending()",
        tests=(_PARITY, _MICROBATCH),
    ),
    Fault(
        name="microbatch-shards-not-summed-across-groups",
        about="The same, only where gradients are kept as shards from the first microbatch on.",
        file="zero/reduce/microbatch_reducer.py",
        old="        self._add_replicas()\n",
        new="",
        tests=(_MICROBATCH,),
    ),
    Fault(
        name="norm-counts-every-replica",
        about="The gradient norm counts a shard once for each group that holds it, so that clipping is too strong.",
        file="zero/flat_buckets.py",
        old="counts and flat.counts)",
        new="counts)",
        tests=(_PARITY,),
    ),
    Fault(
        name="parameters-from-another-group",
        about="After an update a bucket is gathered from the replicas of one shard instead of the shard group.",
        file="zero/optim/sharded_optimizer.py",
        old="all_gather(flat.params, flat.kept, flat.bucket.spread.sharding,",
        new='all_gather(flat.params, flat.kept, "dp_replicate",',
        tests=(_PARITY,),
    ),
    Fault(
        name="shard-of-another-place",
        about="A rank owns the shard that has the number of its group instead of that of its place in it.",
        file="zero/flat_buckets.py",
        old="        return self.index if self.grid is None else self.grid.index(spread.sharding)\n",
        new="        return self.index if self.grid is None else self.grid.coord().dp // self.ranks\n",
        tests=(_PARITY,),
    ),
    Fault(
        name="across-not-planned",
        about="The plan leaves out what the sums over shard groups send.",
        file="engine/planning/budgets.py",
        old="            tally.add(replica_traffic(bucket, grid, wire))\n",
        new="            pass\n",
        tests=(f"{_TESTS}::test_replicas_of_a_shard_keep_equal_bits_and_send_what_is_planned[zero0-changes0]",),
    ),
    Fault(
        name="whole-buckets-across-groups",
        about="Reductions go over all data ranks first, so that full gradients cross the nodes.",
        file="zero/reduce/step_reducer.py",
        old='self._comm.reduce_scatter(wire[shard], wire, progress.flat.bucket.spread.sharding, "gradients")',
        new='self._comm.all_reduce(wire, "dp_shard", "gradients")',
        tests=(_BYTES,),
    ),
    Fault(
        name="every-group-stores",
        about="A checkpoint holds every shard once for each group.",
        file="engine/checkpoint/contents/local_tensors.py",
        old="        return self.grid.is_first(spread.shard_copies, coord)\n",
        new="        return True\n",
        tests=(f"{_STORED}::test_groups_save_every_element_once_and_load_from_any_division[saved0-wanted0]",),
    ),
)
