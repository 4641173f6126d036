"""Runs Triton kernels on a CPU in this process: Triton's interpreter, with its bf16 handling fixed."""

import os


def interpret() -> None:
    """Enables Triton's interpreter with a bf16 fix; must run before any kernel is defined."""
    os.environ["TRITON_INTERPRET"] = "1"
    from tests.kernels.interpreter import repair

    repair()
