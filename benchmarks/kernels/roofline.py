"""Measured limits of the device (bandwidth, TFLOPS), which all shares are relative to, and its name."""

import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from statistics import median
from typing import Any

import torch

from benchmarks.kernels.clock import Clock, nothing

COPY_BYTES = 4 << 30
PRODUCT_SIZE = 8192
SAMPLES = 50
_TINY_COPY_BYTES, _TINY_SIZE = 1 << 16, 32
PACKAGES = ("torch", "triton", "numpy", "transformers", "liger-kernel", "deepspeed")
_QUERY = "name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,power.limit,temperature.gpu"


def about(device: torch.device) -> dict[str, Any]:
    """Returns software versions, and the GPU's name and current clocks."""
    versions = {"python": platform.python_version(), "cuda": torch.version.cuda}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = None
    return {"versions": versions, "device": device_name(device), "gpu": _gpu(device), "clocks": clocks(device)}


def device_name(device: torch.device) -> str:
    """Returns the device name in ``tuned.json``'s form."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def clocks(device: torch.device) -> dict[str, str] | str:
    """Returns the clocks from nvidia-smi, or the reason why there are none."""
    if device.type != "cuda" or not shutil.which("nvidia-smi"):
        return "no nvidia-smi"
    command = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader", f"--id={device.index or 0}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (subprocess.SubprocessError, OSError) as error:
        return f"nvidia-smi failed: {error}"
    return dict(zip(_QUERY.split(","), done.stdout.strip().split(", "), strict=False))


def _gpu(device: torch.device) -> dict[str, Any]:
    if device.type != "cuda":
        return {}
    found = torch.cuda.get_device_properties(device)
    return {
        "processors": found.multi_processor_count,
        "memory_bytes": found.total_memory,
        "capability": f"{found.major}.{found.minor}",
    }


def measure_rates(device: torch.device, clock: Clock) -> dict[str, float]:
    """Measures the copy rate (bytes read plus written per second) and the rate of bf16 products (FLOP/s)."""
    return {
        "copy_bytes_per_second": _copy_rate(device, clock),
        "product_flops_per_second": _product_rate(device, clock),
    }


def _copy_rate(device: torch.device, clock: Clock) -> float:
    size = COPY_BYTES if device.type == "cuda" else _TINY_COPY_BYTES
    source = torch.randint(0, 256, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / _median(clock, lambda: target.copy_(source))


def _product_rate(device: torch.device, clock: Clock) -> float:
    n = PRODUCT_SIZE if device.type == "cuda" else _TINY_SIZE
    a, b = (torch.randn(n, n, device=device).to(torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * n**3 / _median(clock, lambda: torch.mm(a, b, out=out))


def _median(clock: Clock, work: Any) -> float:
    clock.sample(nothing, work, 5)
    return median(clock.sample(nothing, work, SAMPLES))
