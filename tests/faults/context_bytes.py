"""Faults of counted bytes, recomputed blocks and learned positions of context ranks."""

from tests.faults.fault import Fault

_SEQUENCES, _BLOCK = "parallel/context/sequences.py", "kernels/ops/attention_block.py"
_AGAIN = "tests/parallel/context/test_recomputed_sequences.py"

CONTEXT_BYTES = (
    Fault(
        name="scores-on-shapes",
        about="A run on shapes counts the scores of the reference where a kernel stores none.",
        file=_BLOCK,
        old="        (is_host(q.device) or q.is_meta) and exact",
        new="        is_host(q.device) and not _on_shapes(q) and exact",
        tests=("tests/kernels/ops/test_attention_block.py::test_bytes_of_a_block_without_a_mask_grow_as_its_length",),
    ),
    Fault(
        name="triangle-off-by-one",
        about="A mask from a triangle of ones hides the keys on its edge.",
        file="parallel/context/recipe.py",
        old="        hidden = columns > edge if",
        new="        hidden = columns >= edge if",
        tests=("tests/parallel/context/test_recipe.py::test_a_recipe_and_its_parts_are_what_torch_makes",),
    ),
    Fault(
        name="whole-table-of-positions",
        about="A table of learned positions returns the rows of all ranks on each of them.",
        file=_SEQUENCES,
        old="        if index is None or (ids.ndim == 2 and",
        new="        if index is None or ids.ndim or (ids.ndim == 2 and",
        tests=("tests/parallel/context/test_position_tables.py::test_a_table_of_positions_returns_the_rows_of_a_rank",),
    ),
    Fault(
        name="longest-from-short-samples",
        about="The longest row is read from a line through short samples, where other bytes are the most.",
        file="engine/planning/cost_model/longest.py",
        old="    for _ in range(MOST_CORRECTED):",
        new="    for _ in range(0):",
        tests=(
            "tests/engine/planning/cost_model/test_longest.py"
            "::test_bytes_that_grow_only_from_some_length_on_are_counted_there",
        ),
    ),
)
