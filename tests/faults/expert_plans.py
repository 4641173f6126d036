"""Faults of plans of shared experts, and of what they prove and exchange."""

from tests.faults.fault import Fault

_EXCHANGE = "tests/engine/planning/cost_model/test_expert_exchange.py"
_TRAFFIC = "tests/engine/planning/step_time/test_expert_traffic.py"
_PLANS = "tests/launch/planner/test_expert_plans.py"
_LISTED = "tests/parallel/experts/test_listed.py"
_THIN = "tests/parallel/experts/test_thin_products.py"

EXPERT_PLANS = (
    Fault(
        name="expected-rows-once-to-each-expert",
        about="The plan counts a row for each expert of a token, although a rank gets one row for all of its experts.",
        file="engine/planning/cost_model/expert_exchange.py",
        old='        if self.form != "token":',
        new='        if self.form != "nothing":',
        tests=(f"{_EXCHANGE}::test_even_routing_sends_the_mean_over_all_routings",),
    ),
    Fault(
        name="uneven-experts-planned-as-even",
        about="The plan expects equal rows for ranks with more and with fewer experts.",
        file="engine/planning/cost_model/expert_exchange.py",
        old="        return least + (rank < more)",
        new="        return least",
        tests=(f"{_EXCHANGE}::test_even_routing_sends_the_mean_over_all_routings",),
    ),
    Fault(
        name="worst-load-of-one-rank",
        about="The most bytes of any routing leave out that all other ranks may send their tokens to one.",
        file="engine/planning/cost_model/expert_exchange.py",
        old="return ExchangedRows(self.tokens * gives, (self.ranks - 1) * self._most_of_one)",
        new="return ExchangedRows(self.tokens * gives, self._most_of_one)",
        tests=(f"{_EXCHANGE}::test_no_routing_sends_more_than_the_most_and_one_sends_as_much",),
    ),
    Fault(
        name="recomputed-exchange-not-planned",
        about="The plan leaves out the rows that a recomputed forward sends again.",
        file="engine/planning/step_time/expert_traffic.py",
        old='forwards = 1 if config.activation_checkpointing.mode == "none" else 2',
        new="forwards = 1",
        tests=(f"{_TRAFFIC}::test_steps_with_random_routing_send_the_expected_bytes[Drawn-8-parallel1-full]",),
    ),
    Fault(
        name="round-of-rows-not-in-the-memory",
        about="The memory of a plan leaves out the rows of experts that a rank gives and receives in a round.",
        file="engine/planning/step_time/plan_costs.py",
        old="_gathered(plan, coord) + (exchanged.round if exchanged is not None else 0.0)",
        new="_gathered(plan, coord)",
        tests=(f"{_PLANS}::test_the_memory_of_a_plan_has_a_round_of_rows",),
    ),
    Fault(
        name="round-of-the-first-pipeline-rank-for-all",
        about="Counted memory of a plan has the round of the first pipeline rank on each, with and without experts.",
        file="launch/planner/planned_model.py",
        old="costs.exchanges[pp].round",
        new="costs.exchanges[0].round",
        tests=(f"{_PLANS}::test_the_memory_of_a_plan_has_a_round_of_rows",),
    ),
    Fault(
        name="idle-listed-experts-leave-the-backward",
        about="A rank whose listed experts get no rows does not join the gradients of its own rows: all ranks wait.",
        file="parallel/experts/listed.py",
        old="unread = (got,) if ties and not len(got) else ()",
        new="unread = ()",
        tests=(f"{_LISTED}::test_a_rank_whose_experts_get_no_rows_joins_the_gradients_of_its_own_rows",),
    ),
    Fault(
        name="thin-matrices-written-out",
        about="A trial of experts of published widths writes their matrices out.",
        file="parallel/experts/proof.py",
        old="thin = any(map(is_expanded, self._twin.parameters()))",
        new="thin = False",
        tests=(f"{_THIN}::test_a_trial_of_wide_experts_needs_no_memory_of_their_size[grouped_mm]",),
    ),
    Fault(
        name="first-expert-proven-alone",
        about="Experts of a list with settings of their own are shared, although they read all rows of a rank.",
        file="parallel/experts/proof.py",
        old="for each in others.values():",
        new="for each in ():",
        tests=(
            "tests/parallel/experts/test_proof.py::test_a_member_other_than_the_first_is_tried_too[centered-a row's "
            "result depends on other rows]",
        ),
    ),
)
