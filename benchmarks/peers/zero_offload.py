"""ZeRO-Offload by DeepSpeed on the CPU: ZeRO 1, bf16, with master weights and moments updated by its CPUAdam.

The first use of CPUAdam compiles an extension.
"""

import io
import os
import tempfile
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from engine.models.decoder import loss_sum


class ZeroOffloadPeer:
    """DeepSpeed with ``offload_optimizer``, for ``rows`` sequences per step.

    Raises:
        ImportError, RuntimeError: DeepSpeed is missing, or its extension does not compile.
    """

    def __init__(self, model: nn.Module, rows: int) -> None:
        for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "DS_ACCELERATOR": "cpu"}.items():
            os.environ.setdefault(name, value)
        if not dist.is_initialized():
            meeting = tempfile.mkdtemp(prefix="zero-offload-")
            dist.init_process_group("gloo", init_method=f"file://{meeting}/meeting", rank=0, world_size=1)
        config: dict[str, Any] = {
            "train_batch_size": rows,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.1}},
        }
        with redirect_stdout(io.StringIO()):  # what it tells of its extension
            import deepspeed

            self._engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)

    def step(self, batch: Mapping[str, Tensor]) -> None:
        """Runs one training step."""
        total, weight = loss_sum(self._engine(batch["input_ids"]), batch)
        self._engine.backward(total / weight)
        self._engine.step()


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
