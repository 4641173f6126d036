"""``deepspeed.runtime.zero.offload_config``: names of devices, and of state that ``offload_states`` moves."""

from enum import StrEnum


class OffloadDeviceEnum(StrEnum):
    """Places of state; ``offload_states`` accepts cpu."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(StrEnum):
    """State that ``offload_states`` moves; DeepSpeed's contiguous gradient buffer means the gradients here."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"
