"""Faults of blocks that the user has compiled."""

from tests.faults.fault import Fault

COMPILED_BLOCKS = (
    Fault(
        name="communication-inside-compiled-blocks",
        about="Sharded layers of blocks that the user has compiled are traced by the compiler, which recurses.",
        file="engine/build/assemble.py",
        old="    return plan.config.compile or any(map(has_compiled_code, model.modules()))\n",
        new="    return plan.config.compile\n",
        tests=("tests/engine/parity/test_compiled_blocks.py",),
    ),
    Fault(
        name="compiled-blocks-around-a-cut",
        about="A compiled block in which a stage begins hides its operations, and the stage reports another path.",
        file="parallel/pipeline/runtime/stage.py",
        old="            self._run_eagerly(module)\n",
        new="            pass\n",
        tests=(
            "tests/parallel/pipeline/runtime/test_stage.py::test_a_compiled_block_runs_eagerly_where_a_stage_begins_inside_it",
        ),
    ),
)
