"""``deepspeed.ops.adam``: Adam and AdamW under the names of DeepSpeed's kernels."""

from collections.abc import Iterable
from typing import Any

import torch

from engine.errors import ConfigError


class FusedAdam(torch.optim.Adam):
    """torch's Adam under DeepSpeed's name, with decoupled weight decay unless ``adam_w_mode`` is False.

    ``set_grad_none`` has no effect.

    Raises:
        ConfigError: ``bias_correction`` is False.
    """

    elementwise = True

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-3, bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, adam_w_mode: bool = True,
        weight_decay: float = 0.0, amsgrad: bool = False, set_grad_none: bool = True,
    ) -> None:  # fmt: skip
        if not bias_correction:
            raise ConfigError(
                f"{type(self).__name__}(bias_correction=False): moments are always corrected for their start at zero; "
                "leave bias_correction out."
            )
        super().__init__(
            params, lr, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad,
            decoupled_weight_decay=adam_w_mode,
        )  # fmt: skip
        self.defaults["adam_w_mode"] = adam_w_mode  # an engine builds the optimizer again, from its defaults


class DeepSpeedCPUAdam(FusedAdam):
    """``FusedAdam`` with the arguments of DeepSpeed's CPU optimizer; ``offload_optimizer`` of the configuration moves
    its state to the host.

    ``fp32_optimizer_states`` has no effect.
    """

    def __init__(
        self, model_params: Iterable[Any], lr: float = 1e-3, bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.0, amsgrad: bool = False,
        adamw_mode: bool = True, fp32_optimizer_states: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(model_params, lr, bias_correction, betas, eps, adamw_mode, weight_decay, amsgrad)
        self.defaults["adamw_mode"] = adamw_mode
