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
)
