"""ZeRO 1 to 3 by DeepSpeed, on the CPU.

DeepSpeed reads RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, which are set here without a launcher, and
uses the running process group. DS_ACCELERATOR=cpu keeps it off a GPU, over gloo, or ccl where Intel's binding is
installed. Its first start compiles an extension, which needs a C++ compiler and minutes.

All else is DeepSpeed's default: stages 1 and 2 all-reduce gradients over gloo and keep a flat copy of the parameters
they update; stage 2 reduces after every microbatch; stage 3 leaves small parameters (below
``stage3_param_persistence_threshold``) whole.
"""

import io
import os
import warnings
from contextlib import redirect_stdout
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.peers.models import CHOSEN, EXPERTS, mixture_config
from benchmarks.peers.workload import Mode, Workload, make_adamw, make_model, mean_loss


class DeepSpeedPeer:
    """DeepSpeed with ``deepspeed.initialize``, and the loop of its tutorial: ``backward`` and ``step`` per
    microbatch.
    """

    def __init__(self, mode: Mode, workload: Workload) -> None:
        announce(mode)
        import deepspeed  # here, so that its import counts as its start-up, and after what it reads

        self._accumulation = mode.accumulation
        with redirect_stdout(io.StringIO()):  # what it tells of its extension
            model, optimizer = self._make(mode, workload)
            config = make_config(mode, workload, sum(parameter.numel() for parameter in model.parameters()))
            self._engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def _make(self, mode: Mode, workload: Workload) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Makes the model and the optimizer of its parameters."""
        model = make_model(workload)
        return model, make_adamw(list(model.parameters()), workload)

    def step(self, rows: Tensor) -> float:
        """Trains one step; returns the loss of this rank's sequences."""
        loss = 0.0
        for part in rows.chunk(self._accumulation):
            mean = mean_loss(self._engine(part[:, :-1]), part[:, 1:])
            self._engine.backward(mean)
            self._engine.step()
            loss += mean.item() / self._accumulation
        return loss


def make_config(mode: Mode, workload: Workload, parameters: int) -> dict[str, Any]:
    """Returns the configuration of a DeepSpeed mode, with the AdamW of the other peers.

    The bucket contains the whole model, as with the default of 5e8 elements, which would allocate 2 GB per step.
    """
    return {
        "train_batch_size": workload.sequences,
        "gradient_accumulation_steps": mode.accumulation,
        "zero_optimization": {"stage": mode.stage, "reduce_bucket_size": parameters},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": workload.clip,
    }


def announce(mode: Mode) -> None:
    """Sets the environment variables of a launcher for the running process group."""
    rank = str(dist.get_rank())
    given = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": str(mode.ranks), "DS_ACCELERATOR": "cpu"}
    for name, value in (given | {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}).items():
        os.environ.setdefault(name, value)
    # torch 2.13 deprecates the collectives that DeepSpeed calls; a warning for each would be part of its CPU time
    warnings.filterwarnings("ignore", message=".*is deprecated", category=FutureWarning)


class DeepSpeedExperts(DeepSpeedPeer):
    """``ExpertLayer`` with ``deepspeed.moe.layer.MoE`` in place of its experts: top-2 gating without drops."""

    def _make(self, mode: Mode, workload: Workload) -> tuple[nn.Module, torch.optim.Optimizer]:
        from deepspeed.moe.layer import MoE
        from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer as split_groups
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeMLP

        config = mixture_config(workload.decoder)
        model = make_model(workload)
        expert = Qwen3MoeMLP(config, intermediate_size=config.moe_intermediate_size)  # type: ignore[no-untyped-call]
        model.mlp = FirstOf(MoE(config.hidden_size, expert, EXPERTS, mode.ranks, CHOSEN, drop_tokens=False))
        groups = split_groups({"params": list(model.parameters()), "name": "all"})
        return model, make_adamw(groups, workload)


class FirstOf(nn.Module):
    """Module that returns the first result of another module."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)[0]
        return y
