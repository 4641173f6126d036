"""Kernels on a CPU: Triton's interpreter, with bf16 put right, in this process."""

import os


def interpret() -> None:
    """Enables Triton's interpreter with a bf16 fix; must run before any kernel is defined."""
    os.environ["TRITON_INTERPRET"] = "1"
    from tests.kernels.interpreter import repair

    repair()
