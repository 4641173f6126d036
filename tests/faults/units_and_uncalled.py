"""Faults of blocks in several units, and of ranks whose experts nobody calls."""

from tests.faults.fault import Fault

UNITS_AND_UNCALLED = (
    Fault(
        name="units-share-what-is-kept",
        about="Units of one block keep outputs in one queue, which the last unit reads first in the backward.",
        file="parallel/activation_checkpointing/blocks.py",
        old="            made.append(SavedActivations())\n            return",
        new="            made.extend([] if made else [SavedActivations()])\n            return",
        tests=(
            "tests/parallel/activation_checkpointing/test_selective.py::"
            "test_units_of_a_block_reuse_only_what_each_has_kept",
        ),
    ),
    Fault(
        name="uncalled-experts-leave-the-backward",
        about="A rank whose experts nobody calls sends no gradients back, and others wait for them.",
        file="parallel/experts/listed.py",
        old="ties = ties if made.requires_grad else (*ties, got)",
        new="ties = ties",
        tests=(
            "tests/parallel/experts/test_listed.py::test_a_rank_whose_experts_are_not_called_joins_the_backward[rows0]",
        ),
    ),
)
