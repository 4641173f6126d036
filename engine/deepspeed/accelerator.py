"""``deepspeed.accelerator``: the device of this process behind DeepSpeed's names."""

from contextlib import nullcontext
from typing import Any

import torch

from engine.deepspeed.comm import default_backend
from engine.kernels.device import is_host
from engine.parallel.comm.world import read_world


class Accelerator:
    """Names of DeepSpeed's accelerator object; other attributes are those of torch's module for the device."""

    def __init__(self) -> None:
        self._kind = read_world().device.type
        self._module: Any = torch.get_device_module(self._kind)
        self._is_host = is_host(read_world().device)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_module" not in vars(self):
            raise AttributeError(name)
        return getattr(self._module, name)

    def device_name(self, device_index: int | None = None) -> str:
        """Type of the device, with an index if one is given and the type has several."""
        return self._kind if device_index is None or self._is_host else f"{self._kind}:{device_index}"

    def current_device(self) -> Any:
        """Index of the device; its name where there is one alone."""
        return self._kind if self._is_host else self._module.current_device()

    def current_device_name(self) -> str:
        """Name of the device of this process, as tensors have it."""
        return self._kind if self._is_host else f"{self._kind}:{self._module.current_device()}"

    def device(self, device_index: int | None = None) -> Any:
        """Context of a device."""
        return nullcontext() if self._is_host else self._module.device(device_index)

    def set_device(self, device_index: int) -> None:
        """Use a device of this type from now on."""
        if not self._is_host:
            self._module.set_device(device_index)

    def device_count(self) -> int:
        """Number of devices that this process sees."""
        return 1 if self._is_host else int(self._module.device_count())

    def is_available(self) -> bool:
        """True: a device was found."""
        return True

    def is_synchronized_device(self) -> bool:
        """Whether operations are complete when their calls return."""
        return self._is_host

    def communication_backend_name(self) -> str:
        """Backend of torch.distributed for the device."""
        return default_backend(self._kind)

    def synchronize(self, device_index: int | None = None) -> None:
        """Wait for the device."""
        if not self._is_host:
            self._module.synchronize(device_index)

    def empty_cache(self) -> None:
        """Release memory that torch's allocator keeps."""
        if not self._is_host:
            self._module.empty_cache()

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Bytes of tensors on the device; 0 on the host."""
        return 0 if self._is_host else int(self._module.memory_allocated(device_index))

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """Largest number of these bytes so far."""
        return 0 if self._is_host else int(self._module.max_memory_allocated(device_index))

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        """Begin to count that anew."""
        if not self._is_host:
            self._module.reset_peak_memory_stats(device_index)

    def manual_seed(self, seed: int) -> None:
        """Seed the device's generator."""
        torch.manual_seed(seed) if self._is_host else self._module.manual_seed(seed)

    manual_seed_all = manual_seed

    def initial_seed(self) -> int:
        """Seed of the device's generator."""
        return torch.initial_seed() if self._is_host else int(self._module.initial_seed())

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        """State of the device's generator."""
        if self._is_host:
            return torch.get_rng_state()
        state: torch.Tensor = self._module.get_rng_state(*(() if device_index is None else (device_index,)))
        return state

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        """Set that state."""
        if self._is_host:
            torch.set_rng_state(new_state)
        else:
            self._module.set_rng_state(new_state, *(() if device_index is None else (device_index,)))

    def random(self) -> Any:
        """Module of random numbers."""
        return torch.random

    def is_bf16_supported(self) -> bool:
        """True: what the device lacks, torch computes in fp32."""
        return True

    def is_fp16_supported(self) -> bool:
        """Whether training in fp16 makes sense there."""
        return not self._is_host

    def supported_dtypes(self) -> list[torch.dtype]:
        """Floating dtypes of training."""
        half = [] if self._is_host else [torch.float16]
        return [torch.float32, torch.bfloat16, *half]

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is on the device."""
        return tensor.device.type in (self._kind,)

    def pin_memory(self, tensor: torch.Tensor, align_bytes: int = 1) -> torch.Tensor:
        """A page-locked copy, where the device copies from such memory."""
        return tensor if self._is_host else tensor.pin_memory()


def get_accelerator() -> Accelerator:
    """The device of this process."""
    return Accelerator()
