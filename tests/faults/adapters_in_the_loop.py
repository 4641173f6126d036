"""Faults of adapters that change in forward, of layers that blocks share, and of models of pictures."""

from tests.faults.fault import Fault

_HOOKED = (
    "tests/engine/planning/test_hooked_values.py::"
    "test_tensor_ranks_leave_a_block_whole_that_reads_other_values_than_its_arguments"
)

ADAPTERS_IN_THE_LOOP = (
    Fault(
        name="values-of-hooks-not-seen",
        about="A block to which hooks give values is proven without them, and cut.",
        file="engine/planning/isolated_block.py",
        old="    return not {leaf.source for leaf in leaves if isinstance(leaf, Sample)}.issuperset(call.inputs)\n",
        new="    return not leaves\n",
        tests=(_HOOKED,),
    ),
    Fault(
        name="freezing-counted-as-a-read",
        about="A forward that freezes a parameter counts as one that reads it, which tensor ranks refuse.",
        file="parallel/trace/torch_function.py",
        old="        return not self.is_metadata and self.name not in _SWITCHES\n",
        new="        return not self.is_metadata\n",
        tests=(_HOOKED,),
    ),
    Fault(
        name="layer-of-two-blocks-cut",
        about="A layer that two blocks hold is cut for the sums of one of them.",
        file="engine/planning/tensor_plan_search.py",
        old="        if not self.shared.isdisjoint(unit.alike):\n",
        new="        if not unit.alike:\n",
        tests=(
            "tests/engine/planning/test_shared_layers.py::test_tensor_ranks_train_blocks_that_hold_one_layer_together",
        ),
    ),
    Fault(
        name="first-forward-not-looked-at",
        about="A forward that moves parameters out of the engine's memory is refused after an update without them.",
        file="engine/step/runner.py",
        old=" or self._problem_of_forward()\n",
        new="\n",
        tests=(
            "tests/engine/step/test_moved_parameters.py::"
            "test_a_forward_that_moves_a_parameter_is_refused_before_the_first_update",
        ),
    ),
    Fault(
        name="activation-hidden-in-a-transform",
        about="A trace takes an activation inside vmap for a tensor without gradient.",
        file="parallel/trace/recorder.py",
        old="inside_transform() and any(self.provenance.knows(_unwrapped(tensor)) for tensor in operation.tensors):\n",
        new="inside_transform() and not operation.tensors:\n",
        tests=(
            "tests/parallel/trace/test_transforms.py::test_an_activation_inside_a_transform_is_refused_with_its_line",
        ),
    ),
    Fault(
        name="transform-of-positions-refused",
        about="The mask of a Gemma 3, which vmap makes of positions, is refused on tensor ranks and pipelines.",
        file="parallel/trace/recorder.py",
        old="            if isinstance(leaf, Tensor) and not _is_wrapped(leaf):\n",
        new="            if isinstance(leaf, Tensor):\n",
        tests=("tests/parallel/trace/test_transforms.py::test_a_mask_that_a_transform_makes_of_positions_is_traced",),
    ),
    Fault(
        name="entries-of-pictures-lost",
        about="An output with an entry for each picture is joined entry by entry, and rows are lost.",
        file="engine/program/batch.py",
        old="            return _like(first, list(chain.from_iterable(outputs)))\n",
        new="            return first\n",
        tests=("tests/engine/program/test_batch.py::test_outputs_are_joined_along_rows",),
    ),
    Fault(
        name="names-beside-parameters-taken",
        about="An optimizer that pairs parameters by a list of names gets others than its list has.",
        file="engine/optim/param_groups.py",
        old="    _refuse_parallel_lists(optimizer)\n",
        new="",
        tests=("tests/engine/optim/test_param_groups.py::test_a_group_with_an_entry_for_each_parameter_is_refused",),
    ),
)
