"""Device of this process under the names of ``deepspeed.accelerator``."""

from contextlib import nullcontext
from typing import Any

import torch

from engine.deepspeed.comm import default_backend
from engine.kernels.device import is_host
from engine.parallel.comm.world import read_world


class Accelerator:
    """Interface to the device of this process, returned by ``deepspeed.accelerator.get_accelerator()``.

    Attributes that this class lacks are read from torch's module of the device type, such as ``torch.cuda``.
    """

    def __init__(self) -> None:
        self._kind = read_world().device.type
        self._module: Any = torch.get_device_module(self._kind)
        self._is_host = is_host(read_world().device)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_module" not in vars(self):
            raise AttributeError(name)
        return getattr(self._module, name)

    def device_name(self, device_index: int | None = None) -> str:
        """Returns the device type of this process, such as "cuda"; with ``device_index``, also the index, such as
        "cuda:1".

        The result is always "cpu" on the CPU.
        """
        return self._kind if device_index is None or self._is_host else f"{self._kind}:{device_index}"

    def current_device(self) -> Any:
        """Returns the index of the current device, or "cpu" on the CPU."""
        return self._kind if self._is_host else self._module.current_device()

    def current_device_name(self) -> str:
        """Returns the current device as text, such as "cuda:0" or "cpu"."""
        return self._kind if self._is_host else f"{self._kind}:{self._module.current_device()}"

    def device(self, device_index: int | None = None) -> Any:
        """Returns a context manager that makes device ``device_index`` current; no effect on the CPU."""
        return nullcontext() if self._is_host else self._module.device(device_index)

    def set_device(self, device_index: int) -> None:
        """Makes device ``device_index`` current; no effect on the CPU."""
        if not self._is_host:
            self._module.set_device(device_index)

    def device_count(self) -> int:
        """Returns the number of accelerators visible to this process; 1 on the CPU."""
        return 1 if self._is_host else int(self._module.device_count())

    def is_available(self) -> bool:
        """Returns True, because every process has a device."""
        return True

    def is_synchronized_device(self) -> bool:
        """Returns True on the CPU, where operations run synchronously; False on accelerators."""
        return self._is_host

    def communication_backend_name(self) -> str:
        """Returns the name of the torch.distributed backend for the device, such as "nccl"."""
        return default_backend(self._kind)

    def synchronize(self, device_index: int | None = None) -> None:
        """Waits until the device ``device_index`` (default: the current one) has finished its queued work; no effect on
        the CPU.
        """
        if not self._is_host:
            self._module.synchronize(device_index)

    def empty_cache(self) -> None:
        """Frees unused memory of torch's caching allocator; no effect on the CPU."""
        if not self._is_host:
            self._module.empty_cache()

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Returns the bytes that tensors now occupy on the device (default: the current one); 0 on the CPU."""
        return 0 if self._is_host else int(self._module.memory_allocated(device_index))

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """Returns the peak of ``memory_allocated`` since the process started or ``reset_peak_memory_stats`` was called.

        The result is 0 on the CPU.
        """
        return 0 if self._is_host else int(self._module.max_memory_allocated(device_index))

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        """Resets the peak of ``max_memory_allocated`` to the bytes now allocated; no effect on the CPU."""
        if not self._is_host:
            self._module.reset_peak_memory_stats(device_index)

    def manual_seed(self, seed: int) -> None:
        """Seeds the random generator of the current device."""
        torch.manual_seed(seed) if self._is_host else self._module.manual_seed(seed)

    manual_seed_all = manual_seed

    def initial_seed(self) -> int:
        """Returns the seed of the current device's random generator."""
        return torch.initial_seed() if self._is_host else int(self._module.initial_seed())

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        """Returns the state of the device's random generator (default: the current device), a uint8 tensor."""
        if self._is_host:
            return torch.get_rng_state()
        state: torch.Tensor = self._module.get_rng_state(*(() if device_index is None else (device_index,)))
        return state

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        """Sets the state of the device's random generator (default: the current device) to ``new_state``."""
        if self._is_host:
            torch.set_rng_state(new_state)
        else:
            self._module.set_rng_state(new_state, *(() if device_index is None else (device_index,)))

    def random(self) -> Any:
        """Returns the module ``torch.random``."""
        return torch.random

    def is_bf16_supported(self) -> bool:
        """Returns True, because torch computes bf16 on every device."""
        return True

    def is_fp16_supported(self) -> bool:
        """Returns True on GPUs, False on the CPU."""
        return not self._is_host

    def supported_dtypes(self) -> list[torch.dtype]:
        """Returns the dtypes in which models can be trained: fp32, bf16 and, except on the CPU, fp16."""
        half = [] if self._is_host else [torch.float16]
        return [torch.float32, torch.bfloat16, *half]

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """Returns True if the tensor is on a device of this process's device type."""
        return tensor.device.type in (self._kind,)

    def pin_memory(self, tensor: torch.Tensor, align_bytes: int = 1) -> torch.Tensor:
        """Returns a copy of ``tensor`` in page-locked host memory, or ``tensor`` itself if the process trains on the
        CPU.

        ``align_bytes`` has no effect.
        """
        return tensor if self._is_host else tensor.pin_memory()


def get_accelerator() -> Accelerator:
    """Returns a new object with DeepSpeed's accelerator methods."""
    return Accelerator()
