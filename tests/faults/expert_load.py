"""Faults of the expert load: what is counted, where, and what the report makes of it."""

from tests.faults.fault import Fault

COUNTER = "engine/program/expert_load.py"
TEST = "tests/engine/test_expert_load.py"

EXPERT_LOAD = (
    Fault(
        name="recomputed-rows-count",
        about="Counting goes on behind the forward, so rows count twice where blocks are computed again in backward.",
        file=COUNTER,
        old="            self._into = before",
        new="            self._into = into",
        tests=(f"{TEST}::test_every_grid_counts_the_rows_of_one_process",),
    ),
    Fault(
        name="dropped-rows-go-to-the-last-expert",
        about="Rows that the router gives to no expert count for the last one.",
        file=COUNTER,
        old="numbers = numbers.where((numbers >= 0) & (numbers < experts), experts).flatten()",
        new="numbers = numbers.clamp(0, experts - 1).flatten()",
        tests=(f"{TEST}::test_numbers_of_no_expert_count_for_none",),
    ),
    Fault(
        name="tensor-ranks-count-again",
        about="Every tensor rank counts the rows that all of them route.",
        file=COUNTER,
        old="        return own & (not earlier)\n",
        new="        return own\n",
        tests=(f"{TEST}::test_every_grid_counts_the_rows_of_one_process",),
    ),
    Fault(
        name="load-of-one-rank",
        about="The report has the rows that this rank counted, and not the sum over all ranks.",
        file="engine/step/update.py",
        old='        self._comm.all_reduce(packed, "world", "control").wait()\n',
        new='        own = packed.clone()\n        self._comm.all_reduce(packed, "world", "control").wait()\n'
        "        if step.experts is not None:\n            packed[-len(step.experts) :] = own[-len(step.experts) :]\n",
        tests=(f"{TEST}::test_every_grid_counts_the_rows_of_one_process",),
    ),
    Fault(
        name="first-pass-counts",
        about="A list that data ranks share counts each row in the pass that asks experts, and again in the next one.",
        file="parallel/experts/listed.py",
        old="with self._passing(Pass.ASK), self._uncounted():",
        new="with self._passing(Pass.ASK):",
        tests=(f"{TEST}::test_a_shared_list_counts_the_rows_that_its_router_chooses",),
    ),
    Fault(
        name="experts-not-planned",
        about="The plan leaves out the counts of experts that travel in the control sum.",
        file="engine/planning/plan.py",
        old="control_traffic(self.config, self.grid(0).world_size, counted)",
        new="control_traffic(self.config, self.grid(0).world_size)",
        tests=(f"{TEST}::test_every_grid_counts_the_rows_of_one_process",),
    ),
    Fault(
        name="forward-before-zero-grad-lost",
        about="zero_grad between forward and backward drops the rows of that forward.",
        file="engine/step/user_loop.py",
        old="        if self.state is not LoopState.FORWARDED:  # else its backward is one of the next step\n"
        "            self._counted = None",
        new="        self._counted = None",
        tests=(f"{TEST}::test_a_loop_of_your_own_counts_its_forwards",),
    ),
    Fault(
        name="heat-map-loses-the-last-column",
        about="A heat map lacks the newest steps of every expert.",
        file="launch/run_report/charts.py",
        old="for column in range(1, len(levels) + 1):",
        new="for column in range(1, len(levels)):",
        tests=("tests/launch/test_report_experts.py::test_colours_say_how_far_from_even_an_expert_is",),
    ),
)
