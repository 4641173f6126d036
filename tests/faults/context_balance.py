"""Faults of late logits over context ranks, and of documents that context ranks share by work."""

from tests.faults.fault import Fault

_LATE = "tests/parallel/context/test_late_logits.py"

CONTEXT_BALANCE = (
    Fault(
        name="late-logits-off-for-context-ranks",
        about="Context ranks store all logits of their positions, which limits the length of a sequence.",
        file="engine/build/assemble.py",
        old='plan.is_last(f"{head}.weight")]',
        new='plan.is_last(f"{head}.weight") and comm.grid.cp == 1]',
        tests=(f"{_LATE}::test_no_rank_stores_the_logits_of_its_positions[2]",),
    ),
    Fault(
        name="shifted-logits-computed-in-full",
        about="A slice of late logits along positions computes all of them before the loss.",
        file="parallel/tensor/logits/lazy_logits.py",
        old="Tensor._is_view: is_view, ",
        new="",
        tests=(f"{_LATE}::test_logits_in_chunks_train_as_one_process[shifted-a rank without labels-cp2]",),
    ),
)
