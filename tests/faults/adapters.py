"""Faults of adapters: in the weights of experts, and behind a detach."""

from tests.faults.fault import Fault

_DETACHED = "tests/engine/planning/test_detached_traffic.py::test_what_a_detach_cuts_off_is_not_planned"
_PAIRS = "tests/parallel/tensor/auto/test_adapters.py"
_STACKS = "tests/parallel/model/test_parametrized_weights.py::test_a_stack_with_adapters_is_as_it_was_after_each_call"

ADAPTERS = (
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
