"""Faults of plans with context ranks, and of the longest row that they find."""

from tests.faults.fault import Fault

_PLANS = "tests/engine/planning/step_time/test_context_plans.py"
_LONGEST = "tests/engine/planning/cost_model/test_longest.py"

CONTEXT_PLAN = (
    Fault(
        name="keys-over-context-ranks-cost-nothing",
        about="The predicted step leaves out the time in which context ranks wait for keys and values.",
        file="engine/planning/step_time/prediction.py",
        old="waits[op, stage] = whole / 2",
        new="waits[op, stage] = 0.0",
        tests=(f"{_PLANS}::test_keys_values_and_their_gradients_are_waited_for_over_the_context_axis",),
    ),
    Fault(
        name="plan-forgets-its-context-ranks",
        about="The costs of a plan are those of a grid without context ranks: activations of whole sequences.",
        file="engine/planning/step_time/plan_costs.py",
        old="        cp=config.cp,\n",
        new="",
        tests=(f"{_PLANS}::test_a_plan_has_the_layout_of_its_context_ranks",),
    ),
    Fault(
        name="gathered-keys-not-in-the-memory",
        about="The closed form leaves out the keys and values of all context ranks that a block stores.",
        file="engine/planning/cost_model/estimate.py",
        old="return kept + keys * (",
        new="return kept + 0 * keys * (",
        tests=(f"{_PLANS}::test_context_ranks_divide_computation_activations_and_state",),
    ),
    Fault(
        name="longest-row-above-the-limit",
        about="The search for the longest row returns the first length that does not fit.",
        file="engine/planning/cost_model/longest.py",
        old="    return low * step",
        new="    return high * step",
        tests=(f"{_LONGEST}::test_bisection_finds_the_largest_multiple",),
    ),
    Fault(
        name="samples-on-a-line",
        about="Sampled blocks grow linearly with the length, although a written mask grows with its square.",
        file="engine/planning/cost_model/longest.py",
        old="prod((length - other) / (own - other) for other in lengths if other != own)",
        new="(length / own) / len(lengths)",
        tests=(f"{_LONGEST}::test_counted_blocks_replace_closed_forms_at_any_length",),
    ),
    Fault(
        name="work-of-context-ranks-without-their-own-key",
        about="The planned work of context ranks leaves out that a query sees its own key.",
        file="parallel/context/balance.py",
        old="(runs[:, 0] + runs[:, 1] + 1) // 2",
        new="(runs[:, 0] + runs[:, 1] - 1) // 2",
        tests=("tests/parallel/context/test_balance.py::test_planned_pairs_are_those_that_queries_see",),
    ),
)
