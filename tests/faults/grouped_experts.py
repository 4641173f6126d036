"""Faults of the products of experts in the engine's kernels, and of pieces of other microbatches in their waits."""

from tests.faults.fault import Fault

_BESIDE = "tests/engine/parity/test_experts_beside.py"
_DISPATCH = "tests/parallel/experts/test_dispatch.py"
_FILLED = "test_weight_gradients_are_computed_while_rows_travel_to_the_same_bit[zb-h1-with a shared expert]"
_AWAITED = "tests/parallel/experts/test_awaited.py"

GROUPED_EXPERTS = (
    Fault(
        name="idle-while-rows-travel",
        about="A rank waits for rows of its experts although weight gradients of another microbatch are left.",
        file="parallel/experts/dispatch.py",
        old="        comm.filled(each)  # one piece, as all messages travel together\n",
        new="        pass\n",
        tests=(
            f"{_DISPATCH}::test_a_schedule_fills_one_wait_for_all_tensors_that_travel_together",
            f"{_BESIDE}::{_FILLED}",
        ),
    ),
    Fault(
        name="idle-while-results-come-back",
        about="A rank waits for results of experts although weight gradients of another microbatch are left.",
        file="parallel/experts/awaited.py",
        old="arrival.expect(rows, comm.filled(pending))",
        new="arrival.expect(rows, pending)",
        tests=(f"{_AWAITED}::test_a_schedule_fills_the_waits_for_results_and_for_their_gradients",),
    ),
)
