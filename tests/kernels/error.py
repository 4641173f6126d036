"""How far an operator may be from the truth."""

from collections.abc import Sequence

from torch import Tensor

from benchmarks.kernels.cases.errors import Operator, deviations


def check_error(ours: Operator, eager: Operator, inputs: Sequence[Tensor]) -> None:
    """Assert that each output and gradient of ``ours`` errs at most twice as much as ``eager`` in the same dtype."""
    for number, one in enumerate(deviations(ours, eager, inputs)):
        assert one.holds, f"result {number}: error {one.error:.3g}, allowed {one.allowed:.3g}"
