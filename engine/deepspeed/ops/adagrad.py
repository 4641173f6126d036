"""``deepspeed.ops.adagrad``: Adagrad under DeepSpeed's name."""

from collections.abc import Iterable
from typing import Any

import torch


class DeepSpeedCPUAdagrad(torch.optim.Adagrad):
    """torch's Adagrad under DeepSpeed's name; ``offload_optimizer`` of the configuration moves its state to the host.

    ``amsgrad`` and ``fp32_optimizer_states`` have no effect.
    """

    elementwise = True

    def __init__(
        self, model_params: Iterable[Any], lr: float = 1e-2, eps: float = 1e-10, weight_decay: float = 0.0,
        amsgrad: bool = False, fp32_optimizer_states: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(model_params, lr, eps=eps, weight_decay=weight_decay)
