"""Faults of blocks in several units, which a pipeline rank recomputes one by one."""

from tests.faults.fault import Fault

_FILE = "tests/engine/parity/test_recomputed_parts.py"
_STATE = f"{_FILE}::test_units_are_recomputed_with_the_state_of_their_forward"

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
    Fault(
        name="units-recomputed-with-later-state",
        about="A unit of a recomputed block runs again on the state that later forwards have left in its modules.",
        file="parallel/pipeline/runtime/stage.py",
        old="again = self._states[unit].keeping(forward) if restores else fused_as_first(module, forward)",
        new="again = fused_as_first(module, forward)",
        tests=(_STATE,),
    ),
    Fault(
        name="units-recomputed-outside-their-owner",
        about="A layer that a unit of the user's own checkpoint runs again leaves the fused activation out.",
        file="parallel/tensor/deferred_linear.py",
        old="            set_outside(marked, first)\n",
        new="            set_outside(marked, before)\n",
        tests=(_STATE,),
    ),
    Fault(
        name="units-recomputed-from-written-inputs",
        about="A unit of a recomputed block runs again from inputs that a later operation has written in place.",
        file="parallel/pipeline/runtime/stage_forward.py",
        old="return not any(self.trace.values[number].rewritten for number in read)",
        new="return True",
        tests=(_STATE,),
    ),
    Fault(
        name="units-keep-outputs-written-later",
        about="A unit reuses an output that code between units has written in place after the unit.",
        file="parallel/model/torch_checkpoint.py",
        old="            end(out)\n",
        new="            pass\n",
        tests=(_STATE,),
    ),
    Fault(
        name="tiles-around-units",
        about="A module in tiles calls the units of other stages once for each tile.",
        file="parallel/context/rows/rowwise.py",
        old="return any(_is_in(name, self.name) for name in names)",
        new="return False",
        tests=(f"{_FILE}::test_no_tile_goes_around_the_calls_of_another_stage",),
    ),
    Fault(
        name="units-recomputed-outside-of-modes",
        about="A unit of a recomputed block runs again outside of the function modes of its forward.",
        file="parallel/pipeline/runtime/stage.py",
        old="        forward = as_in_forward(forward, region.again)\n",
        new="",
        tests=(_STATE,),
    ),
    Fault(
        name="recomputed-from-a-users-seed",
        about="A block that seeds torch's generators draws other masks in backward than in forward.",
        file="parallel/model/rng_streams.py",
        old="begin if restored else None",
        new="None",
        tests=(_STATE,),
    ),
    Fault(
        name="recomputed-with-other-attention",
        about="A recomputed block chooses its attention backend without the user's sdpa_kernel around it.",
        file="parallel/activation_checkpointing/blocks.py",
        old="                entered.enter_context(sdpa_kernel(backends))\n",
        new="                pass\n",
        tests=(_STATE,),
    ),
)
