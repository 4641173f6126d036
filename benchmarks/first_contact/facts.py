"""Versions and measured limits of this machine: memory bandwidth, matmul TFLOPS, fastest attention, host sync time."""

import os
import platform
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import product
from types import MappingProxyType

import torch
from torch import Tensor
from torch.backends import cudnn
from torch.cuda import nccl
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.first_contact.telling import Finding, device_kind, each, event_ms, on_gpu, settle
from benchmarks.harness.figures import version_of

PACKAGES = (
    "torch", "triton", "transformers", "numpy", "safetensors", "xxhash", "accelerate", "peft", "pytest", "pytest-xdist",
    "hypothesis", "jsonschema", "datasets", "trl", "bitsandbytes", "deepspeed", "liger-kernel",
)  # fmt: skip
BACKENDS: Mapping[str, SDPBackend | None] = MappingProxyType(
    {"default": None, "flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
)
SHAPES = MappingProxyType({"1b": (2, 32, 8, 4096, 64), "8b": (1, 32, 8, 8192, 128)})
"""Attention sizes: batch, heads, key heads, tokens, head width."""
MIB = 1 << 20
NEEDS_GPU = ("device", "rates", "loss chunks", "attention", "what blocks the host")


def run_facts(names: Sequence[str]) -> None:
    """Measures and prints every fact in ``names``."""
    bodies: dict[str, Callable[[], Finding]] = {
        "versions": _versions, "host": _host, "device": _device, "rates": _rates, "dW into fp32": _wide_gradients,
        "loss chunks": _loss_chunks, "attention": _attention, "what blocks the host": _what_blocks,
    }  # fmt: skip

    def body(name: str) -> Finding:
        if name in NEEDS_GPU and not on_gpu():
            return {"ok": None, "why": "needs a GPU"}
        return bodies[name]()

    each(names, body)


def _versions() -> Finding:
    found = {name: version_of(name) for name in PACKAGES}
    began = time.perf_counter()
    from engine.api import initialize  # noqa: F401 - the import is what is timed

    return {
        "python": platform.python_version(),
        "packages": found,
        "torch": found["torch"],
        "triton": found["triton"],
        "absent": " ".join(name for name, version in found.items() if not version),
        "cpus": os.cpu_count(),
        "import_engine_s": round(time.perf_counter() - began, 2),
    }


def _host() -> Finding:
    x = torch.zeros(8, device=device_kind())
    for _ in range(100):
        x.add_(1)
    settle()
    began = time.perf_counter()
    for _ in range(2000):
        x.add_(1)
    launch = (time.perf_counter() - began) / 2000
    settle()
    began, total = time.perf_counter(), 0
    for index in range(2_000_000):
        total += index
    loop = (time.perf_counter() - began) / 2_000_000
    return {"us_per_eager_op": round(launch * 1e6, 2), "python_loop_ns": round(loop * 1e9, 1)}


def _device() -> Finding:
    found = torch.cuda.get_device_properties(0)
    query = "--query-gpu=name,driver_version,memory.total,clocks.sm,clocks.mem,power.limit"
    told = subprocess.run(
        ["nvidia-smi", query, "--format=csv,noheader"], capture_output=True, text=True, timeout=20, check=False
    )
    return {
        "gpu": found.name,
        "sms": found.multi_processor_count,
        "smi": told.stdout.strip(),
        "cuda": torch.version.cuda,
        "nccl": str(nccl.version()),  # type: ignore[no-untyped-call]
        "cudnn": cudnn.version(),  # type: ignore[no-untyped-call]
        "shared_bytes": getattr(found, "shared_memory_per_block_optin", None),
    }


def _rates() -> Finding:
    copy = _copy_ms(1 << 32)
    m, n = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    multiplied = event_ms(lambda: m @ n, 20)
    pinned, pageable = (torch.empty(256 * MIB, dtype=torch.uint8, pin_memory=pin) for pin in (True, False))
    there = torch.empty(256 * MIB, dtype=torch.uint8, device="cuda")

    def rate(work: Callable[[], object]) -> float:
        return round(256 * MIB / event_ms(work, 5) / 1e6, 1)

    return {
        "copy_TBps": round(2 * (1 << 32) / copy / 1e9, 2),
        "bf16_8192_TFLOPs": round(2 * 8192**3 / multiplied / 1e9),
        "h2d_pinned_GBps": rate(lambda: there.copy_(pinned, non_blocking=True)),
        "d2h_pinned_GBps": rate(lambda: pinned.copy_(there, non_blocking=True)),
        "h2d_pageable_GBps": rate(lambda: there.copy_(pageable)),
    }


def _copy_ms(size: int) -> float:
    given = torch.empty(size, dtype=torch.uint8, device="cuda")
    taken = torch.empty_like(given)
    return event_ms(lambda: taken.copy_(given), 5)


def _wide_gradients() -> Finding:
    """Time a product into bf16, one added to an fp32 sum, and one that begins the sum."""
    from engine.kernels.ops.linear import add_by_library_

    found: Finding = {}
    for out, width, tokens in ((8192, 2048, 8192), (14336, 4096, 8192)) if on_gpu() else ((16, 16, 16),):
        d = torch.randn(tokens, out, device=device_kind()).bfloat16()
        x = torch.randn(tokens, width, device=device_kind()).bfloat16()
        total = torch.zeros(out, width, device=device_kind())
        works: dict[str, Callable[[], object]] = {
            "bf16": partial(torch.mm, d.t(), x),
            "added": partial(add_by_library_, total, d.t(), x),
            "fresh": partial(add_by_library_, total, d.t(), x, True),
        }
        found[f"{out}x{width}"] = {name: round(event_ms(work, 10), 3) for name, work in works.items()}
    return found


def _loss_chunks() -> Finding:
    from engine.kernels.dispatch import Kernels
    from engine.kernels.ops import linear_cross_entropy as ops
    from engine.kernels.ops.cross_entropy import CrossEntropy

    x = torch.randn(8192, 2048, device="cuda", dtype=torch.bfloat16).requires_grad_()
    w = (torch.randn(128256, 2048, device="cuda", dtype=torch.bfloat16) * 0.02).requires_grad_()
    y = torch.randint(128256, (8192,), device="cuda")
    own, found = ops.chunk_tokens, dict[str, float]()

    def run() -> None:
        torch.autograd.backward(ops.linear_cross_entropy(x, w, None, y, CrossEntropy(), Kernels("auto")))
        x.grad = w.grad = None

    try:
        for chunk in (own(8192, 2048, 128256), 1024, 2048, 4096):
            ops.chunk_tokens = lambda tokens, width, columns, chunk=chunk: chunk  # type: ignore[misc]
            found[f"{chunk} ms"] = round(event_ms(run, 5), 2)
    finally:
        ops.chunk_tokens = own
    return found | {"own": own(8192, 2048, 128256), "floor ms": round(6 * 8192 * 2048 * 128256 / 700e9, 2)}


def _attention() -> Finding:
    return dict(_attention_rate(label, which) for label, which in product(SHAPES, BACKENDS))


def _attention_rate(label: str, which: str) -> tuple[str, float | str]:
    (batch, heads, kv, tokens, width), backend = SHAPES[label], BACKENDS[which]

    def rows(count: int) -> Tensor:
        made = torch.randn(batch, tokens, count, width, device="cuda", dtype=torch.bfloat16)
        return made.transpose(1, 2).requires_grad_()

    q, k, v = rows(heads), rows(kv), rows(kv)

    def run() -> None:
        with nullcontext() if backend is None else sdpa_kernel(backend):
            y = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        torch.autograd.grad(y, (q, k, v), y.detach())

    operations = 3.5 * 2 * batch * heads * tokens * tokens * width  # forward 4, backward 10, causal half
    try:
        return f"{label} {which} TFLOPs", round(operations / event_ms(run, 5) / 1e9)
    except RuntimeError as error:
        return f"{label} {which}", str(error).splitlines()[0][:80]


def _what_blocks() -> Finding:
    """Time what a copy to a busy device costs the host, by memory and size."""
    found: Finding = {}
    for pinned, size in product((False, True), (16 << 10, 64 << 10, 128 << 10, MIB)):
        x = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        x.to("cuda", non_blocking=True)  # the allocator has the memory from now on
        torch.cuda.synchronize()
        torch.cuda._sleep(100_000_000)  # type: ignore[no-untyped-call]  # about 50 ms
        began = time.perf_counter()
        x.to("cuda", non_blocking=True)
        took = round((time.perf_counter() - began) * 1e3, 2)
        found[f"{'pinned' if pinned else 'pageable'} {size >> 10}K ms"] = took
    torch.cuda.synchronize()
    return found
