"""Faults of what nodes keep of gathered parameters."""

from tests.faults.fault import Fault

_TESTS = "tests/zero/test_secondary_shards.py"
_SAME_BITS = f"{_TESTS}::test_two_nodes_train_to_the_bits_of_none_and_use_nothing_stale[zero0-changes0]"
_CODES = f"{_TESTS}::test_two_nodes_train_to_the_bits_of_none_and_use_nothing_stale[zero1-changes1]"
_LOADED = f"{_TESTS}::test_a_load_ends_what_nodes_have_kept"

SECONDARY_SHARDS = (
    Fault(
        name="secondary-shards-of-the-step-before",
        about="After an update a forward computes with the parameters that a node has kept from before it.",
        file="zero/gather/gatherer.py",
        old="        self._whole.drop_secondary()\n        self._whole.settle()\n",
        new="        self._whole.settle()\n",
        tests=(_SAME_BITS,),
    ),
    Fault(
        name="secondary-shard-of-another-place",
        about="A rank keeps the part of a bucket that its neighbour in the node has to keep.",
        file="zero/gather/secondary_shards.py",
        old="comm.grid.index(comm.grid.shard_line) % layout.ranks",
        new='(comm.grid.index("dp") + 1) % layout.ranks',
        tests=(_SAME_BITS,),
    ),
    Fault(
        name="written-parameters-not-gathered",
        about="What the user writes in full_parameters is not seen by forwards until the next step.",
        file="zero/gather/gatherer.py",
        old="        self._whole.drop_secondary(indices)\n",
        new="",
        tests=(_SAME_BITS,),
    ),
    Fault(
        name="written-masters-not-gathered",
        about="What the user writes into masters is not seen by forwards until the next step.",
        file="engine/named_state.py",
        old="                runtime.weights_written()\n",
        new="                pass\n",
        tests=(_SAME_BITS,),
    ),
    Fault(
        name="secondary-shards-outlive-a-load",
        about="After a load forwards compute with the parameters that a node has kept from before it.",
        file="engine/checkpoint/resume.py",
        old="        run.runtime.weights_written()\n        if self._states:\n",
        new="        if self._states:\n",
        tests=(_LOADED,),
    ),
    Fault(
        name="full-parameters-from-secondary-shards",
        about="full_parameters shows what codes decode to, because a node has kept it, and writes it back.",
        file="zero/gather/unsharded_buckets.py",
        old="        if not exact:\n",
        new="        if True:\n",
        tests=(_CODES,),
    ),
    Fault(
        name="later-gathers-planned-across-nodes",
        about="The plan says that every gather goes over all data ranks.",
        file="engine/planning/budgets.py",
        old="self.pinned, self.within.buckets, axis)",
        new="self.pinned, (), axis)",
        tests=(_SAME_BITS,),
    ),
)
