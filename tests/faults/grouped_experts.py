"""Faults of the products of experts in the engine's kernels, and of pieces of other microbatches in their waits."""

from tests.faults.fault import Fault

_BESIDE = "tests/engine/parity/test_experts_beside.py"
_DISPATCH = "tests/parallel/experts/test_dispatch.py"
_FILLED = "test_weight_gradients_are_computed_while_rows_travel_to_the_same_bit[zb-h1-with a shared expert]"
_STACKS = "tests/parallel/kernel_injection/test_expert_stacks.py"
_AWAITED = "tests/parallel/experts/test_awaited.py"

GROUPED_EXPERTS = (
    Fault(
        name="idle-while-rows-travel",
        about="A rank waits for rows of its experts although weight gradients of another microbatch are left.",
        file="parallel/experts/dispatch.py",
        old="        comm.filled(each)  # one piece, as all messages travel together\n",
        new="        pass\n",
        tests=(
            f"{_DISPATCH}::test_a_schedule_fills_one_wait_for_all_tensors_that_travel_together",
            f"{_BESIDE}::{_FILLED}",
        ),
    ),
    Fault(
        name="idle-while-results-come-back",
        about="A rank waits for results of experts although weight gradients of another microbatch are left.",
        file="parallel/experts/awaited.py",
        old="arrival.expect(rows, comm.filled(pending))",
        new="arrival.expect(rows, pending)",
        tests=(f"{_AWAITED}::test_a_schedule_fills_the_waits_for_results_and_for_their_gradients",),
    ),
    Fault(
        name="a-stack-copied-in-its-own-order",
        about="A stack of experts that is stored in another order of dims is read as if it were contiguous.",
        file="kernels/gpu/matmul.py",
        old="tensor.clone(memory_format=torch.contiguous_format)",
        new="tensor.clone()",
        tests=("tests/kernels/ops/test_grouped_product.py::test_a_kernel_reads_stacks_in_any_order_of_their_dims",),
    ),
    Fault(
        name="columns-of-a-wider-matrix",
        about="A kernel reads columns of a wider matrix as if they were contiguous.",
        file="kernels/gpu/matmul.py",
        old="    if tensor.is_contiguous() and not tensor.data_ptr() % _ALIGNED:",
        new="    if not tensor.data_ptr() % _ALIGNED:",
        tests=("tests/kernels/gpu/test_matmul.py::test_columns_of_a_wider_matrix_are_read_at_their_place",),
    ),
    Fault(
        name="grouped-rows-of-the-next-expert",
        about="Grouped products multiply rows by the matrices of the next expert.",
        file="parallel/kernel_injection/expert_stacks.py",
        old="torch.arange(experts, device=flat.device), right=True)",
        new="torch.arange(experts, device=flat.device), right=False)",
        tests=(f"{_STACKS}::test_a_loop_over_experts_runs_as_grouped_products[-reference]",),
    ),
    Fault(
        name="experts-that-answer-other-slots-replaced",
        about="A trial never asks for a slot without an expert, so that other answers to it are lost.",
        file="parallel/kernel_injection/expert_stacks.py",
        old="numbers = numbers.masked_fill(numbers == _EXPERTS, experts)",
        new="numbers = numbers.masked_fill(numbers == _EXPERTS, 0)",
        tests=(f"{_STACKS}::test_a_module_that_answers_rows_without_an_expert_stays_as_it_is",),
    ),
)
