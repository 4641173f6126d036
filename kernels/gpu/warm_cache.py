"""Compilation of a run's kernels into Triton's cache before the run, without a GPU.

    note       a launch runs up to Triton's lookup of a compiled kernel: types, constants, options, divisibility of
               numbers by 16; a substitute driver reports the target GPU, and nothing is compiled or launched
    compile    processes compile the kernels that the cache lacks, with Triton's code path of a launch

The address of a tensor without content is its offset in the storage, because torch's allocations begin at a multiple of
16.
"""

import importlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from engine.kernels.device import triton_target
from engine.kernels.dispatch import launching_on_shapes
from engine.kernels.gpu.launch_shapes import GpuShape, planned_for

_DEVICE = -1
"""The device number under which Triton stores the recorded kernels."""


@dataclass(frozen=True, slots=True)
class NotedKernel:
    """Recorded launch of a kernel: its module, name, argument types, and GPU."""

    module: str
    name: str
    specialization: str
    gpu: GpuShape


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """Name of a compiled kernel, and the seconds that its compilation took."""

    name: str
    seconds: float


class _Driver:
    """Substitute for Triton's driver, for a GPU that is absent."""

    def __init__(self, gpu: GpuShape) -> None:
        self._target = triton_target(gpu.capability)

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return _DEVICE

    def get_current_stream(self, device: int) -> int:
        return 0


class _Place:
    """Launch argument in place of a tensor without content: dtype and address."""

    def __init__(self, tensor: Tensor) -> None:
        self.dtype = tensor.dtype
        self._address = int(tensor.storage_offset()) * tensor.element_size()

    def data_ptr(self) -> int:
        return self._address


@contextmanager
def noted_launches(gpu: GpuShape) -> Iterator[dict[NotedKernel, None]]:
    """Records the launches of Triton kernels inside the context, without running them, as if on the GPU ``gpu``.

    It yields a dict with one key per distinct launch; the values are None.
    """
    from triton import knobs
    from triton.runtime.jit import JITFunction

    found: dict[NotedKernel, None] = {}
    launch, hook = JITFunction.run, knobs.runtime.jit_cache_hook

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        launch(self, *map(_placed, args), grid=grid, warmup=True, **named)

    def note(*, fn: Any, compile: Any, **rest: Any) -> bool:
        kernel = fn.jit_function.fn
        found[NotedKernel(kernel.__module__, kernel.__qualname__, compile["specialization_data"], gpu)] = None
        return True  # nothing is compiled

    JITFunction.run, knobs.runtime.jit_cache_hook = run, note
    try:
        with _standing_in(gpu), planned_for(gpu), launching_on_shapes():
            yield found
    finally:
        JITFunction.run, knobs.runtime.jit_cache_hook = launch, hook
        for kernel in found:
            _function(kernel).device_caches.pop(_DEVICE, None)


def is_compiled(kernel: NotedKernel) -> bool:
    """Returns True if Triton's cache on disk already has the compiled code of ``kernel``."""

    def stop(*args: Any) -> Any:
        raise LookupError

    with _standing_in(kernel.gpu):
        source, target, options = _source(kernel)
        source.make_ir = stop
        try:
            _compile(source, target, options)
        except LookupError:
            return False
    return True


def compile_kernel(kernel: NotedKernel) -> CompiledKernel:
    """Compiles ``kernel`` into Triton's cache on disk, without a GPU; returns its name and the seconds taken."""
    began = time.perf_counter()
    with _standing_in(kernel.gpu):
        _compile(*_source(kernel))
    return CompiledKernel(kernel.name, time.perf_counter() - began)


def _compile(source: Any, target: Any, options: Any) -> None:
    import triton

    triton.compile(source, target=target, options=options)


def _source(kernel: NotedKernel) -> tuple[Any, Any, Any]:
    """Returns the arguments of Triton's compiler in a preload: source, target, options."""
    given: list[tuple[Any, Any, Any]] = []
    function = _function(kernel)
    _ = function.device_caches[_DEVICE]  # the lookup sets the compiler
    function.compile = lambda source, target, options, **_: given.append((source, target, options))
    try:
        function.preload(kernel.specialization)
    finally:
        del function.compile, function.device_caches[_DEVICE]
    return given[0]


def _function(kernel: NotedKernel) -> Any:
    return reduce(getattr, kernel.name.split("."), importlib.import_module(kernel.module))


def _placed(value: Any) -> Any:
    """Returns a substitute for a tensor without content; other values unchanged."""
    without = isinstance(value, FakeTensor) or (isinstance(value, Tensor) and value.is_meta)
    return _Place(value) if without else value


@contextmanager
def _standing_in(gpu: GpuShape) -> Iterator[None]:
    from triton.runtime.driver import driver

    before = driver._active
    driver.set_active(_Driver(gpu))
    try:
        yield
    finally:
        driver._active = before
