"""Faults of steps in which data ranks have different numbers of microbatches."""

from tests.faults.fault import Fault

_EQUALS = (
    "tests/engine/parity/test_uneven_microbatches.py::test_ranks_with_other_numbers_of_microbatches_equal_one_process"
)
_MEANS = "tests/engine/step/test_uneven_steps.py::test_a_mean_weighs_as_its_rows_in_steps_and_evaluations"

UNEVEN_WORK = (
    Fault(
        name="uneven-means-weigh-the-same",
        about="A mean over one row weighs as much as a mean over five rows of another data rank.",
        file="engine/program/program.py",
        old="        weight = float(self.rows.count(moved)) if self.weighs_rows else 1.0\n",
        new="        weight = 1.0\n",
        tests=(_MEANS,),
    ),
    Fault(
        name="ranks-with-fewer-microbatches-leave-early",
        about="A rank whose microbatches are done does not gather with the others, and the step hangs.",
        file="engine/step/counts.py",
        old="        scheduled = max(counts) if meets_each_microbatch(self._plan.config) else own\n",
        new="        scheduled = own\n",
        tests=(_EQUALS,),
    ),
    Fault(
        name="ranks-without-microbatches-gather-nothing",
        about="A rank without a microbatch sends no parameters that are gathered once a step, and the step hangs.",
        file="zero/gather/gatherer.py",
        old="        if self._once:  # also on a rank without passes, whose shards the others need\n",
        new="        if self._once and passes:\n",
        tests=(_EQUALS,),
    ),
    Fault(
        name="uneven-microbatches-share-random-numbers",
        about="Microbatches of two data ranks draw the same dropout masks, as if each rank had the usual number.",
        file="engine/step/counts.py",
        old="        before = [0, *accumulate(counts)][grid.row_rank]\n",
        new="        before = grid.row_rank * self._plan.config.accumulation\n",
        tests=(_EQUALS,),
    ),
)
