"""Faults of kernels that are compiled before the first step, and of the plan that they are compiled for."""

from tests.faults.fault import Fault

_TEST = "tests/launch/planner/test_compile_command.py"
_SAME = (f"{_TEST}::test_kernels_noted_on_shapes_are_those_that_an_engine_launches",)

COMPILED_AHEAD = (
    Fault(
        name="kernels-ahead-for-other-addresses",
        about="Kernels are compiled for tensors at addresses that 16 does not divide, and no launch asks for them.",
        file="kernels/gpu/warm_cache.py",
        old="        self._address = int(tensor.storage_offset()) * tensor.element_size()\n",
        new="        self._address = 8\n",
        tests=(f"{_TEST}::test_a_second_call_finds_every_kernel_in_the_cache", *_SAME),
    ),
    Fault(
        name="no-update-among-kernels-ahead",
        about="The kernels of the optimizer are compiled in the first step.",
        file="engine/dry_run/dry_run_rank.py",
        old="            self._update()\n",
        new="",
        tests=_SAME,
    ),
    Fault(
        name="kernels-of-operators-not-noted",
        about="Operators on shapes launch nothing, so that only those of the optimizer are compiled ahead.",
        file="kernels/dispatch.py",
        old="            if _LAUNCHES.get():\n",
        new="            if False:\n",
        tests=_SAME,
    ),
    Fault(
        name="everything-compiled-again",
        about="A second call compiles what lies in Triton's cache.",
        file="launch/planner/compile_command.py",
        old="    left = [kernel for kernel in noted if not is_compiled(kernel)]\n",
        new="    left = list(noted)\n",
        tests=(f"{_TEST}::test_a_second_call_finds_every_kernel_in_the_cache",),
    ),
    Fault(
        name="layers-with-an-activation-not-shared",
        about="The operator of a linear layer and its activation keeps the layer whole on every tensor rank.",
        file="parallel/tensor/plan/sharding_rules.py",
        old="        if not goes_through_class(module):\n",
        new='        if "forward" in vars(module):\n',
        tests=(
            "tests/parallel/tensor/plan/test_resolve.py"
            "::test_a_forward_that_calls_the_one_of_the_class_stays_on_a_sharded_layer",
        ),
    ),
)
