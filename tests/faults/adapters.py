"""Faults of adapters: in the weights of experts, and behind a detach."""

from tests.faults.fault import Fault

_DETACHED = "tests/engine/planning/test_detached_traffic.py::test_what_a_detach_cuts_off_is_not_planned"
_PAIRS = "tests/parallel/tensor/auto/test_adapters.py"
_STACKS = "tests/parallel/model/test_parametrized_weights.py::test_a_stack_with_adapters_is_as_it_was_after_each_call"
_JOINED = "tests/parallel/tensor/layers/test_adapter_layers.py"

ADAPTERS = (
    Fault(
        name="pairs-have-collectives-of-their-own",
        about="A pair enters and sums as a layer of its own, next to the layer that it adapts.",
        file="parallel/tensor/plan/low_rank_pairs.py",
        old="        if whole is None or around == name",
        new="        if True or whole is None or around == name",
        tests=(f"{_JOINED}::test_pairs_add_no_collective",),
    ),
    Fault(
        name="whole-halves-of-pairs-not-summed",
        about="A of a column layer and B of a row layer keep the gradient of their own rank.",
        file="parallel/tensor/plan/low_rank_pairs.py",
        old="            partial.update(first_name(parameter) for parameter in modules[other].parameters())\n",
        new="",
        tests=(f"{_JOINED}::test_pairs_add_no_collective",),
    ),
    Fault(
        name="bias-of-a-pair-on-each-rank",
        about="The bias of B is added to the product of each rank before the sum of a row layer.",
        file="parallel/tensor/plan/low_rank_pairs.py",
        old="any(modules[other].bias is not None for other in joined.values())",
        new="False",
        tests=(f"{_JOINED}::test_other_pairs_stay_layers_of_their_own",),
    ),
    Fault(
        name="magnitudes-in-a-partial-sum",
        about="An adapter that scales the whole product, as DoRA, computes before the sum of the layer.",
        file="parallel/tensor/plan/low_rank_pairs.py",
        old=' and not getattr(module, "lora_variant", None)',
        new="",
        tests=(f"{_JOINED}::test_other_pairs_stay_layers_of_their_own",),
    ),
    Fault(
        name="a-mask-for-each-shard-of-columns",
        about="The dropout before a pair of a layer with gathered columns draws another mask on each rank.",
        file="parallel/tensor/layers/apply_plan.py",
        old='cut.kind in ("column", "column+gather", "row")',
        new='cut.kind in ("column", "row")',
        tests=(f"{_JOINED}::test_a_mask_is_one_for_all_columns",),
    ),
    Fault(
        name="detached-sums-planned",
        about="The plan counts the sums of input gradients that a detach cuts off, and that nobody sends.",
        file="parallel/tensor/layers/planned_traffic.py",
        old=" if node is None or node in reached]",
        new="]",
        tests=(_DETACHED,),
    ),
    Fault(
        name="graph-of-a-trace-cut",
        about="What runs on zeros in a trace has no graph, so the plan loses the sums of layers before it.",
        file="parallel/trace/meta_tensors.py",
        old="    return linked\n",
        new="    return linked.detach().requires_grad_()\n",
        tests=(_DETACHED,),
    ),
    Fault(
        name="half-of-a-pair-in-a-weight-not-summed",
        about="Gradients of the whole half of a pair inside a weight are not summed over tensor ranks.",
        file="parallel/tensor/auto/coupled_parameters.py",
        old="(*found, *(name for name in names if name in inside))",
        new="found",
        tests=(f"{_PAIRS}::test_pairs_written_into_experts_are_cut_with_them",),
    ),
    Fault(
        name="columns-of-a-pair-in-a-weight-whole",
        about="The half of a pair that is added to the columns of a row layer stays whole, so such experts do too.",
        file="parallel/tensor/auto/coupled_parameters.py",
        old="            cuts |= self._cuts_inside(name, dim, tp, taken)\n",
        new="",
        tests=(f"{_PAIRS}::test_a_pair_written_into_one_matrix_of_experts",),
    ),
    Fault(
        name="scale-of-an-added-product-lost",
        about="A proof adds an adapter without its scale to a weight that is kept as thin factors.",
        file="parallel/tensor/auto/low_rank_weight.py",
        old="bias.factors.plus(alpha * left, right)",
        new="bias.factors.plus(left, right)",
        tests=("tests/parallel/tensor/auto/test_low_rank_weight.py::test_experts",),
    ),
    Fault(
        name="parametrization-counted-as-a-write",
        about="Adding an adapter to a stack of experts counts as a write, which ZeRO 3 refuses.",
        file="parallel/model/parametrized_weights.py",
        old="unchanged_by_itself(own), getattr",
        new="getattr",
        tests=(_STACKS,),
    ),
    Fault(
        name="codes-lost-after-a-parametrization",
        about="After a call with adapters, a stack of codes is no longer the parameter that buckets and gathers move.",
        file="parallel/model/parametrized_weights.py",
        old="        held.clear()\n        held.update(before)\n",
        new="        pass\n",
        tests=(_STACKS,),
    ),
)
