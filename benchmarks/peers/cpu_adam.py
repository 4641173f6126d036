"""DeepSpeed's CPU AdamW, which its ZeRO-Offload uses. Its first use compiles an extension."""

import io
import os
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout

from torch import Tensor, nn


def make_cpu_adam(parameter: nn.Parameter, moments: Mapping[str, Tensor]) -> Callable[[], object]:
    """Returns a function that makes one DeepSpeed AdamW update of ``parameter`` from its gradient; ``moments``: state
    by torch's names.

    Raises:
        ImportError, RuntimeError: DeepSpeed is missing, or its extension does not compile.
    """
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    with redirect_stdout(io.StringIO()):  # what it tells of its extension
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        optimizer = DeepSpeedCPUAdam([parameter], lr=1e-3, weight_decay=0.1, adamw_mode=True)
    optimizer.state[parameter] = {"step": 0, **moments}
    return lambda: optimizer.step()
