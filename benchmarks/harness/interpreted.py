"""Kernels on a CPU: Triton's interpreter, with bf16 put right, in this process."""

import os


def interpret() -> None:
    """Has to come before any kernel is defined."""
    os.environ["TRITON_INTERPRET"] = "1"
    from tests.kernels.interpreter import repair

    repair()
