"""Faults of the ground on which features stand: parts of a step, the inventory of state, one timeout."""

from tests.faults.fault import Fault

GROUND = (
    Fault(
        name="modules-inside-count-with-the-ones-around",
        about="Modules that end inside a unit move the random numbers of what follows, also where a stage skips them.",
        file="parallel/model/rng_streams.py",
        old="yield named[name], len(around)",
        new="yield named[name], 0",
        tests=("tests/engine/parity/test_dropout_in_chains.py::test_stages_draw_what_one_process_draws",),
    ),
    Fault(
        name="parameters-of-other-axes-in-one-bucket",
        about="A parameter that is sharded over other axes than the rest is laid out in a bucket with them.",
        file="zero/layout.py",
        old="item.exact, item.spread, used)",
        new="item.exact, used)",
        tests=("tests/zero/test_layout.py::test_items_of_other_axes_have_buckets_of_their_own_and_other_shards",),
    ),
    Fault(
        name="buffers-that-come-late-are-not-copied",
        about="A buffer that a forward registers after the first step keeps what a skipped step has written.",
        file="engine/step/rank_parts.py",
        old="in self._written or key not in compared",
        new="in self._written or not compared",
        tests=("tests/engine/step/test_nonfinite.py::test_buffers_that_a_forward_registers_are_put_back",),
    ),
    Fault(
        name="earlier-timeout-of-the-watchdog-is-the-whole",
        about="The watchdog's earlier key makes it act after half of the seconds that are given.",
        file="engine/config/reader.py",
        old="math.ceil(2 * value)",
        new="math.ceil(value)",
        tests=("tests/engine/config/test_config.py::test_there_is_one_timeout_and_the_watchdogs_earlier_one_sets_it",),
    ),
    Fault(
        name="forwards-add-to-no-counts",
        about="A part that counts in forwards is not asked for its context, and its sums stay 0.",
        file="engine/step/runtime.py",
        old="for part in self.parts.having(StepPart.forward):",
        new="for part in self.parts.having(StepPart.close):",
        tests=("tests/engine/step/test_parts.py::test_a_part_counts_in_the_forwards_of_its_step",),
    ),
    Fault(
        name="averages-in-no-inventory",
        about="The moving average of the weights is in no list of what a rank holds, so no checkpoint has it.",
        file="zero/state/state_inventory.py",
        old="yield from self.element_state(companion.tensors())",
        new="yield from self.element_state({})",
        tests=("tests/zero/state/test_state_inventory.py::test_the_plan_counts_what_the_inventory_lists",),
    ),
    Fault(
        name="masters-by-name-without-those-of-the-inventory",
        about="Access by name to what the optimizer updates gives out the parameters where there are masters.",
        file="zero/state/state_inventory.py",
        old="tensor=flat.weights, flat=flat, part=flat.owned",
        new="tensor=flat.kept, flat=flat, part=flat.owned",
        tests=("tests/engine/test_named_state.py",),
    ),
)
