"""Every kernel as our launches make it, compiled for GPUs that need not be there: python -m tests.kernels.offline ARCH

A launch on meta tensors is recorded, with its types, constants, warps and which arguments 16 divides, as a launch on a
GPU would specialise them; then Triton compiles it and ptxas tells what it takes. Prints JSON. Must run in a process
that does not interpret.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.kernels.communicating_launches import communicating_launches, expert_launches, switched
from tests.kernels.local_launches import LOCAL, product_launches

OPERATORS = (*LOCAL, communicating_launches, expert_launches)

_TYPES = {
    torch.float64: "fp64", torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.int64: "i64",
    torch.int32: "i32", torch.uint8: "u8", torch.bool: "i1",
}  # fmt: skip
_TENSOR_CORES = re.compile(r"tt\.dot (?:.*inputPrecision = tf32|(?!.* : tensor<\w+xf32>))")
_OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg")


@dataclass(frozen=True)
class Resources:
    """What one compiled kernel takes."""

    registers: int
    shared_bytes: int
    spilled_bytes: int
    wgmma: int
    mma: int
    tcgen05: int
    dots: int
    """Matrix products in the kernel's own code, but for those of exact fp32, which no tensor core has."""
    tma: int
    acquires: int
    """Loads of a signal, of the scope of the system."""
    releases: int
    """Stores of a signal, likewise."""
    multimem: int
    """Loads that add and stores that reach the memory of all ranks."""
    alias_fences: int
    """Between an address of the switch and one of a rank's memory."""


class Recorded:
    """One launch."""

    def __init__(self, kernel: Any, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        self.options = {name: named.pop(name) for name in _OPTIONS if name in named}
        self.kernel, values = kernel, dict(zip(kernel.arg_names, args, strict=False)) | named
        constant = {parameter.name for parameter in kernel.params if parameter.is_constexpr}
        plain = {parameter.name for parameter in kernel.params if parameter.do_not_specialize}
        self.types: dict[str, str] = {}
        self.constants: dict[str, Any] = {}
        self.attributes: dict[tuple[int, ...], Any] = {}
        for index, name in enumerate(kernel.arg_names):
            value = values[name]
            if name in constant or value is None or (type(value) is int and value == 1 and name not in plain):
                self.types[name], self.constants[name] = "constexpr", value
                continue
            self.types[name] = _type_of(value)
            if isinstance(value, Tensor) or (type(value) is int and value % 16 == 0 and name not in plain):
                self.attributes[index,] = [["tt.divisibility", 16]]

    def compile(self, arch: int) -> Resources:
        """Compile for a compute capability such as 90."""
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        source = ASTSource(self.kernel, self.types, self.constants, self.attributes)
        built = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=self.options)
        ptx = built.asm["ptx"]
        registers, spilled = _assemble(ptx, arch)
        return Resources(
            registers,
            built.metadata.shared,
            spilled,
            wgmma=ptx.count("wgmma.mma_async"),
            mma=len(re.findall(r"\bmma\.sync", ptx)),
            tcgen05=ptx.count("tcgen05.mma"),
            dots=len(_TENSOR_CORES.findall(built.asm["ttir"])),
            tma=ptx.count("cp.async.bulk.tensor"),
            acquires=len(
                re.findall(
                    r"\bld\.[\w.]*acquire[\w.]*\.sys|\bld\.[\w.]*sys\.acquire|\batom\.[\w.]*acquire[\w.]*sys", ptx
                )
            ),
            releases=len(re.findall(r"\batom\.[\w.]*(?:release[\w.]*sys|sys[\w.]*release)", ptx)),
            multimem=len(re.findall(r"\bmultimem\.(?:ld_reduce|st)\.relaxed\.sys\b", ptx)),
            alias_fences=ptx.count("fence.proxy.alias"),
        )


def _type_of(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"*{_TYPES[value.dtype]}"
    if isinstance(value, bool):
        return "i1"
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    if isinstance(value, float):
        return "fp32"
    block = ", ".join(map(str, value.block_shape))
    return f"tensordesc<{_TYPES[value.base.dtype]}[{block}]>"


def _assemble(ptx: str, arch: int) -> tuple[int, int]:
    """(registers, spilled bytes) by the assembler that Triton picks for ``arch``."""
    from triton.backends.nvidia.compiler import get_ptxas

    target = re.search(r"\.target (\w+)", ptx)
    assert target is not None
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx, encoding="utf-8")
        command = [get_ptxas(arch).path, "-v", f"--gpu-name={target[1]}", str(source), "-o", str(Path(folder, "out"))]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    text = done.stdout + done.stderr

    def number(pattern: str) -> int:
        found = re.search(pattern, text)
        assert found is not None, text
        return int(found[1])

    return number(r"Used (\d+) registers"), number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads")


@contextmanager
def recording() -> Iterator[list[Recorded]]:
    """Launches inside are recorded and not run."""
    from triton.runtime.jit import JITFunction

    seen: list[Recorded] = []
    own = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        seen.append(Recorded(self, args, named))

    JITFunction.run = run
    try:
        yield seen
    finally:
        JITFunction.run = own


def recorded(launch: Callable[[], Any]) -> dict[str, Recorded]:
    """The launches that ``launch`` makes, by name of the kernel."""
    with recording() as seen:
        launch()
    return {one.kernel.fn.__name__: one for one in seen}


def main(arch: int) -> None:
    """Compile all."""
    found = {
        f"{kernel} {case}": asdict(launch.compile(arch))
        for case, make in (
            *(case for launches in OPERATORS for case in launches()),
            *product_launches(arch),
            *switched(arch),
        )
        for kernel, launch in recorded(make).items()
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]))
