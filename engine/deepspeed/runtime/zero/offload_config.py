"""``deepspeed.runtime.zero.offload_config``: names of devices and of state for ``offload_states``."""

from enum import StrEnum


class OffloadDeviceEnum(StrEnum):
    """Devices to which state can be offloaded; ``offload_states`` accepts only ``cpu``."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(StrEnum):
    """Kinds of state that ``offload_states`` can move to host memory.

    ``optim_states``: moments; ``hp_params``: fp32 master weights; ``lp_params``: parameters; ``lp_grads`` and
    ``contiguous_grad_buffer``: gradients.
    """

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"
