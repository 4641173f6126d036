"""``deepspeed.runtime.zero.offload_config``: names of devices and of state for ``offload_states``."""

from enum import StrEnum


class OffloadDeviceEnum(StrEnum):
    """Names of devices for state; ``offload_states`` accepts only cpu."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(StrEnum):
    """Names of state that ``offload_states`` moves; DeepSpeed's contiguous gradient buffer means gradients."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"
