"""What is put right in Triton's interpreter, by itself."""

import operator
from types import SimpleNamespace

import numpy as np

from tests.kernels.interpreter import repair


class Bound:
    """A tensor of the interpreter, as a loop finds its bound."""

    def __init__(self, data: object) -> None:
        self.handle = SimpleNamespace(data=np.asarray(data))


def test_a_tensor_of_one_element_bounds_a_loop_in_any_shape() -> None:
    """NumPy 2.4 makes no number of an array of one element, which Triton 3.6 asks it for."""
    repair()
    from triton.runtime import interpreter

    interpreter._patch_lang_tensor(Bound, interpreter._LangPatchScope())
    assert [operator.index(Bound(data)) for data in (3, [4], [[5]])] == [3, 4, 5]  # type: ignore[arg-type]
