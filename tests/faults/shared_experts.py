"""Faults of experts that data ranks share, beside other features."""

from tests.faults.fault import Fault

_TESTS = "tests/engine/parity/test_experts.py"
_STATE = f"{_TESTS}::test_state_of_shared_experts_trains_as_one_process"
_ENCODED = (
    f"{_TESTS}::test_encoded_gradients_of_experts_are_sent_to_the_ranks_that_hold_them_as_planned[parallel0-zero0]"
)

SHARED_EXPERTS = (
    Fault(
        name="experts-compared-over-all-data-ranks",
        about="Integrity compares the experts of data ranks that hold different ones, and calls them corrupt.",
        file="zero/state/state_inventory.py",
        old="return self.spread.copies if self.equal else",
        new='return "dp" if self.equal else',
        tests=(f"{_STATE}[ep2-integrity-zero0]",),
    ),
    Fault(
        name="encoded-experts-reduced-over-all-data-ranks",
        about="Encoded gradients of experts are exchanged among data ranks that hold other experts.",
        file="zero/wire_formats.py",
        old="        if spread.sharding == self.axis or not self.axis:\n            return self\n        return",
        new="        return self\n        return",
        tests=(_ENCODED,),
    ),
    Fault(
        name="sums-of-experts-within-a-rank",
        about="Adafactor's means of experts miss the squares of experts on other ranks.",
        file="engine/optim/built_in.py",
        old="copied = shards < grid.experts and any(row.experts for row in rows)",
        new="copied = False",
        tests=(f"{_STATE}[dp4-ep2-adafactor-zero0]",),
    ),
    Fault(
        name="sums-of-copies-of-experts",
        about="Each data rank adds its copy of an expert to the sums of a whole parameter.",
        file="zero/optim/rules/counted_parts.py",
        old="adds = not routes.copied or grid.is_first(_copies(place.flat))",
        new="adds = True",
        tests=(f"{_STATE}[dp4-ep2-adafactor-zero0]",),
    ),
    Fault(
        name="written-experts-compared-over-all-data-ranks",
        about="Values that ranks write into their own experts are refused, since other ranks hold other experts.",
        file="zero/gather/full_tensors.py",
        old="axes = {flat.bucket.slots[0].name: flat.bucket.spread.copies for flat in written}",
        new="axes = {flat.bucket.slots[0].name: sharded.comm.grid.copies for flat in written}",
        tests=(f"{_TESTS}::test_state_by_name_is_that_of_the_experts_of_a_rank[dp4-ep2-3-auto]",),
    ),
)
