"""Every kernel as a GPU compiles it, at sizes that several programs share.

What is compared is what ``benchmarks.kernels`` checks before it measures, here on more shapes and forms.
"""

import pytest
import torch

from benchmarks.kernels.cases.case import Case
from benchmarks.kernels.cases.lineup import DTYPES, MAKERS, checked
from benchmarks.kernels.device_process import check_case

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]  # compilers warn of themselves

CASES = [case for dtype in DTYPES for operator in MAKERS for case in checked(operator, dtype, "all")]


@pytest.fixture(autouse=True)
def exact_matmul() -> None:
    """TF32 would spoil what is compared with."""
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_error_is_at_most_twice_eager_torchs_and_bits_come_twice(case: Case) -> None:
    found = check_case(case, torch.device("cuda"))
    assert found["passed"], found
