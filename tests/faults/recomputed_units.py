"""Faults of blocks in several units, which a pipeline rank recomputes one by one."""

from tests.faults.fault import Fault

RECOMPUTED_UNITS = (
    Fault(
        name="units-share-kept-outputs",
        about="Units of one block keep outputs in one queue, which the last unit reads first in the backward.",
        file="parallel/activation_checkpointing/blocks.py",
        old="            made.append(SavedActivations())\n            return",
        new="            made.extend([] if made else [SavedActivations()])\n            return",
        tests=(
            "tests/parallel/activation_checkpointing/test_selective.py::"
            "test_units_of_a_block_reuse_only_what_each_has_kept",
        ),
    ),
)
