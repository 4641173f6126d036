"""Faults of shared experts that tensor ranks cut along their width: sums, biases, gradients, norm, state and choice."""

from tests.faults.fault import Fault

_ROUTED, _TABLE = "parallel/experts/routed.py", "parallel/shard_table.py"
_PARITY = "tests/engine/parity/test_cut_experts.py"
_TRAINED = (
    "tests/engine/parity/test_cut_experts.py::test_experts_on_tensor_ranks_train_as_one_process[stack-cut-0-False]"
)
_HELD = (
    "tests/engine/checkpoint/test_cut_experts.py::"
    "test_experts_that_tensor_ranks_cut_are_held_and_counted_once_by_expert_and_tensor_rank"
)
_PROOF = "tests/parallel/experts/test_width.py::test_parts_that_are_no_summands_are_refused_with_the_reason"
_FORMS = "engine/planning/cost_model/expert_forms.py"
_COSTS = "tests/engine/planning/cost_model/test_expert_forms.py"
_FORMULA = f"{_COSTS}::test_the_cost_of_a_form_is_that_of_its_formula"
_CHOICE = f"{_COSTS}::test_the_form_is_chosen_by_bytes_and_memory_and_given_with_its_reason"

CUT_EXPERTS = (
    Fault(
        name="cut-experts-not-summed",
        about="Each tensor rank continues with the results of its part of the experts.",
        file=_ROUTED,
        old="summed: Tensor = self._module.tensor_summed(self._all_rows, args, kwargs)",
        new="summed: Tensor = self._all_rows(*args, **kwargs)",
        tests=(_TRAINED,),
    ),
    Fault(
        name="cut-experts-summed-twice",
        about="Results and gradients of cut experts are summed on the ranks of the experts and once more at home.",
        file=_ROUTED,
        old='object.__setattr__(self._module, "tensor_inside", True)',
        new='object.__setattr__(self._module, "tensor_inside", False)',
        tests=(_TRAINED,),
    ),
    Fault(
        name="last-bias-added-by-every-tensor-rank",
        about="A bias after the last product of cut experts is added once for each tensor rank.",
        file=_ROUTED,
        old="if self._tensor.index == 0:\n            return {}",
        new="if True:\n            return {}",
        tests=(_TRAINED,),
    ),
    Fault(
        name="biases-of-cut-experts-not-summed",
        about="Parameters that tensor ranks do not cut have the gradient of one part of the experts.",
        file="engine/planning/expert_plan.py",
        old="(*(name for each in self.routed for name in each.parameters), *common)",
        new="(*(name for each in self.routed if each.added is None for name in each.parameters), *common)",
        tests=(_TRAINED,),
    ),
    Fault(
        name="norm-of-the-first-part-of-cut-experts",
        about="The gradient norm has the parts of experts of the first tensor rank alone.",
        file=_TABLE,
        old="any(each.holders[0] == holder.tp for each in self.ranges)",
        new="any(each.holders[0] == holder.tp == 0 for each in self.ranges)",
        tests=(f"{_HELD}[1-pieces0]", _TRAINED),
    ),
    Fault(
        name="pieces-of-cut-experts-of-the-first-rank",
        about="A checkpoint stores parts of later experts in the place of the first ones.",
        file="engine/checkpoint/format/pieces.py",
        old="    if part.outer is not None:\n        outer +=",
        new="    if part.outer is None:\n        outer +=",
        tests=(f"{_HELD}[1-pieces0]",),
    ),
    Fault(
        name="rounding-of-later-cut-experts-as-the-first",
        about="Stochastic rounding of bf16 weights draws the bits of the first experts on every expert rank.",
        file="zero/optim/bf16_updates.py",
        old="first = experts[0].start * prod(row.shape[1 : dim + 1]) if row.dim and experts else 0",
        new="first = 0",
        tests=(f"{_HELD}[2-pieces1]",),
    ),
    Fault(
        name="sums-of-whole-experts-not-counted",
        about="The form of experts is chosen without the sum of their gradients over tensor ranks.",
        file=_FORMS,
        old="sums = 0 if cut else 2 * 4 * parameters * apart",
        new="sums = 0",
        tests=(_FORMULA,),
    ),
    Fault(
        name="rows-of-whole-lists-counted-as-divided",
        about="The form of experts of a list is chosen as if tensor ranks divided the rows of whole ones.",
        file=_FORMS,
        old="(1 if self.listed and not cut else t),",
        new="t,",
        tests=(_FORMULA, _CHOICE),
    ),
    Fault(
        name="whole-experts-that-do-not-fit",
        about="Experts are whole on tensor ranks although their state does not fit.",
        file=_FORMS,
        old="whole.state_bytes > LARGEST_STATE * gpu.memory_bytes",
        new="False",
        tests=(_CHOICE,),
    ),
    Fault(
        name="width-of-experts-not-tried",
        about="Experts are cut along their width although the results of their parts do not add up.",
        file="parallel/experts/width.py",
        old="if trial.is_sum_of(parts):",
        new="if parts:",
        tests=(_PROOF,),
    ),
    Fault(
        name="width-of-whole-experts-must-divide",
        about="Tensor ranks refuse a list of experts for its width although they hold whole experts.",
        file="engine/planning/tensor_plan_search.py",
        old="taken |= {one.weight for one in patterns.products if self._may_stay_whole(unit, one.weight)}",
        new="taken |= set()",
        tests=(f"{_PARITY}::test_a_list_of_experts_of_odd_width_is_refused_as_cut",),
    ),
    Fault(
        name="trace-without-listed-experts",
        about="A trace of another input refuses experts of its stage, which another expert rank may hold.",
        file="engine/step/trace_cache.py",
        old="[row for row in plan.table if rank in row.owners]",
        new="[row for row in plan.table if rank in row.owners and len(row.experts) != 1]",
        tests=(f"{_PARITY}::test_experts_of_stages_take_inputs_of_another_shape_than_the_example[True]",),
    ),
)
