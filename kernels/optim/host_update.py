"""Updates of fp32 arrays on the host by a compiled kernel (``host_update.cpp``), in one pass over memory.

The kernel runs calls over at least :data:`WORTH` elements of contiguous fp32 tensors; torch's rules run all others
(``update_rules``). The kernel is used only if a sample has torch's bits, so ranks with and without it may train
together, and a user without a compiler loses time only. The kernel also checks if bf16 weights still equal their
rounded masters.

The first use compiles the C++ source and stores the library in ``~/.cache/trine/compiled``, or below the folder in the
environment variable TRINE_CACHE; ``TRINE_CACHE=0`` stores nothing, so nothing is compiled.

The name of a stored file has a digest of source, flags, compiler and CPU, and a digest of the content: a damaged file,
or a file of another CPU with the same home folder, is never loaded. One process compiles and the others wait.
"""

import ctypes
import fcntl
import hashlib
import logging
import math
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from pathlib import Path

import torch
from torch import Tensor, nn

from engine.kernels.device import is_host
from engine.kernels.optim.update_rules import AdamRule, LionRule, adam_, lion_

logger = logging.getLogger("trine")


FLAGS = (
    *("-std=c++17", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC"),
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),  # flags that change no bit of a result
)
_LONGEST = 120.0
"""Time limit of the compiler, in seconds."""


class CompileError(Exception):
    """Error of a failed compilation of a C++ source.

    Its text is the reason, such as "there is no C++ compiler".
    """


def library(source: Path) -> Path | None:
    """Compiles the C++ file ``source`` to a shared library in a cache folder, if it is not there yet; returns its path.

    Returns None without compiling if ``TRINE_CACHE`` is 0.

    Raises:
        CompileError: there is no compiler, the compiler fails, or the result cannot be stored.
    """
    given = os.environ.get("TRINE_CACHE", "")
    if given == "0":
        return None
    compiler = shlex.split(os.environ.get("CXX") or "g++")
    if shutil.which(compiler[0]) is None:
        raise CompileError("there is no C++ compiler (g++, or the one that CXX names)")
    try:
        folder = (Path(given).expanduser() if given else Path.home() / ".cache" / "trine") / "compiled"
        folder.mkdir(parents=True, exist_ok=True)
        command = [*compiler, *FLAGS]
        stem = f"{source.stem}-{_digest(source, command)}"
        with _locked(folder / "lock"):
            return _whole(folder, stem) or _compile(source, command, folder, stem)
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:  # RuntimeError: a user without a home
        raise CompileError(f"its result cannot be read ({error})") from error


def _compile(source: Path, command: list[str], folder: Path, stem: str) -> Path:
    logger.info("%s is compiled for this CPU, once for all runs (%s)", source.name, folder)
    with tempfile.TemporaryDirectory(dir=folder) as place:
        fresh = Path(place) / "library.so"
        done = subprocess.run(
            [*command, str(source), "-o", str(fresh)], check=False, capture_output=True, text=True, timeout=_LONGEST
        )
        if done.returncode:
            said = next((line for line in done.stderr.splitlines() if "error" in line), "without a word")
            raise CompileError(f"{command[0]} refuses to compile it ({said})")
        return fresh.replace(folder / f"{stem}-{_hashed(fresh.read_bytes())}.so")


def _whole(folder: Path, stem: str) -> Path | None:
    """Returns the stored file if its content has the digest of its name; deletes damaged files of this name."""
    for found in sorted(folder.glob(f"{stem}-*.so")):
        if found.stem == f"{stem}-{_hashed(found.read_bytes())}":
            return found
        found.unlink()
    return None


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _digest(source: Path, command: list[str]) -> str:
    version = subprocess.run([*command, "--version"], check=False, capture_output=True, timeout=_LONGEST).stdout
    return _hashed(b"\0".join([source.read_bytes(), version, _cpu(), *(word.encode() for word in command)]))


def _cpu() -> bytes:
    """Returns the CPU's model and instruction sets; the model alone if the system lists no more."""
    try:
        told = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        told = []
    lines = sorted({line for line in told if line.lower().startswith(("model name", "flags", "features", "cpu part"))})
    return "\n".join([platform.machine(), platform.processor(), *lines]).encode()


def _hashed(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


WORTH = 1 << 18
"""Minimum elements of a call for the compiled kernel; smaller arrays fit in caches."""
SOURCE = Path(__file__).with_name("host_update.cpp")
_Update = Callable[..., object]
_LANES = (8, 16, 4)
"""Possible vector lengths of torch's kernels, in elements, the most likely first."""


def update_adam_(
    weights: Sequence[Tensor],
    grads: Sequence[Tensor],
    first_moments: Sequence[Tensor],
    second_moments: Sequence[Tensor],
    step: int,
    rule: AdamRule,
) -> None:
    """Performs update ``step`` (from 1) of Adam or AdamW on ``weights`` in place; the results equal :func:`adam_` in
    all bits.

    A compiled C++ kernel updates large fp32 tensors on the CPU.
    """
    kernel = _kernel_for((*weights, *grads, *first_moments, *second_moments), len(weights))
    if kernel is None:
        adam_(weights, grads, first_moments, second_moments, step, rule)
        return
    for w, g, m, v in zip(weights, grads, first_moments, second_moments, strict=True):
        kernel.adam(w, g, m, v, step, rule)


def update_lion_(weights: Sequence[Tensor], grads: Sequence[Tensor], momenta: Sequence[Tensor], rule: LionRule) -> None:
    """Makes a Lion update of ``weights`` in place; the results equal :func:`lion_` in all bits.

    A compiled C++ kernel updates large fp32 tensors on the CPU.
    """
    kernel = _kernel_for((*weights, *grads, *momenta), len(weights))
    if kernel is None:
        lion_(weights, grads, momenta, rule)
        return
    for w, g, m in zip(weights, grads, momenta, strict=True):
        kernel.lion(w, g, m, rule)


def rounds_to(wide: Tensor, narrow: Tensor) -> bool:
    """Returns True if ``wide`` (fp32), rounded to bf16, equals ``narrow`` everywhere.

    False: a number differs, or the compiled kernel is not available for the tensors.
    """
    kernel = _kernel_for((wide,), 1) if narrow.dtype == torch.bfloat16 and is_host(narrow.device) else None
    return kernel is not None and narrow.is_contiguous() and kernel.rounds_to(wide, narrow)


@dataclass(frozen=True, slots=True)
class HostKernel:
    """Adam and Lion updates on the CPU, compiled from C++, for contiguous fp32 tensors of one size."""

    compiled: ctypes.CDLL
    lanes: int
    """Number of elements in a vector of torch's kernels; remainders are computed differently."""

    def adam(self, w: Tensor, g: Tensor, m: Tensor, v: Tensor, step: int, rule: AdamRule) -> None:
        """Performs update ``step`` (from 1) of Adam or AdamW on weights ``w`` and moments ``m`` and ``v``, in place.

        ``g`` is the gradient.
        """
        age, (beta1, beta2) = rule.age(step), rule.betas
        numbers = _floats(
            1 - rule.lr * rule.weight_decay,
            rule.weight_decay,
            1 - beta1,
            beta2,
            1 - beta2,
            math.sqrt(1 - beta2**age),
            rule.eps,
            rule.lr / (1 - beta1**age),
        )
        decay = (1 if rule.decoupled else 2) if rule.weight_decay else 0
        self.compiled.trine_adam(*_places(w, g, m, v), numbers, decay, *self._spans())

    def lion(self, w: Tensor, g: Tensor, m: Tensor, rule: LionRule) -> None:
        """Makes a Lion update of weights ``w`` and momentum ``m`` in place; ``g`` is the gradient."""
        beta1, beta2 = rule.betas
        numbers = _floats(rule.lr, 1 - rule.lr * rule.weight_decay, 1 - beta1, 1 - beta2)
        self.compiled.trine_lion(*_places(w, g, m), numbers, self._spans()[0])

    def rounds_to(self, wide: Tensor, narrow: Tensor) -> bool:
        """Returns True if ``wide`` (fp32), rounded to bf16, equals ``narrow`` everywhere.

        It returns False if there is a NaN.
        """
        places = ctypes.c_void_p(wide.data_ptr()), ctypes.c_void_p(narrow.data_ptr())
        return bool(self.compiled.trine_rounds_to(*places, ctypes.c_int64(wide.numel()), self._spans()[0]))

    def _spans(self) -> tuple[ctypes.c_int64, ctypes.c_int64]:
        """Returns torch's division of an array: the number of threads, and the elements of a vector."""
        return ctypes.c_int64(torch.get_num_threads()), ctypes.c_int64(self.lanes)


@cache
def host_kernel() -> HostKernel | None:
    """Returns the compiled Adam and Lion updates; the first call compiles or loads them.

    None: the compilation fails or ``TRINE_CACHE`` is 0, or results differ from torch's.
    """
    try:
        made = library(SOURCE)
        compiled = ctypes.CDLL(str(made)) if made is not None else None
    except (CompileError, OSError) as error:
        logger.warning(
            "torch makes the updates on the host, because the engine's kernel was not compiled: %s; the numbers are "
            "the same, but take longer.",
            error,
        )
        return None
    if compiled is None:
        return None
    for lanes in _LANES:
        kernel = HostKernel(compiled, lanes)
        if has_bits_of_torch(kernel):
            return kernel
    logger.info("torch makes the updates on the host, because the engine's kernel has other bits on this CPU.")
    return None


def has_bits_of_torch(kernel: HostKernel) -> bool:
    """Returns True if the Adam and Lion updates of ``kernel`` equal torch's in all bits, on random numbers."""
    w, g, m, v = torch.randn(4, 1021, generator=torch.Generator().manual_seed(0)).unbind()
    v = v.square()
    return all(_agree(ours, theirs, (w, g, m, v)) for ours, theirs in _pairs(kernel))


def _pairs(kernel: HostKernel) -> Iterator[tuple[_Update, _Update]]:
    """Yields pairs of updates of (weights, gradient, two moments), by the kernel and by torch."""
    for first, decoupled in product((0.9, 0.3), (True, False)):
        adam = AdamRule(0.1, (first, 0.99), 1e-8, 0.1, decoupled)
        yield partial(kernel.adam, step=3, rule=adam), lambda w, g, m, v, by=adam: adam_([w], [g], [m], [v], 3, by)
        lion = LionRule(0.1, (first, 0.99), 0.1)
        yield lambda w, g, m, v, by=lion: kernel.lion(w, g, m, by), lambda w, g, m, v, by=lion: lion_([w], [g], [m], by)


def _agree(ours: _Update, theirs: _Update, given: Sequence[Tensor]) -> bool:
    here, there = ([tensor.clone() for tensor in given] for _ in range(2))
    ours(*here)
    theirs(*there)
    return all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in zip(here, there, strict=True))


def _kernel_for(tensors: Sequence[Tensor], updated: int) -> HostKernel | None:
    """Returns the kernel for a call that updates the first ``updated`` tensors; None if unsupported or too small."""
    if sum(tensor.numel() for tensor in tensors[:updated]) < WORTH:
        return None
    return host_kernel() if all(_is_plain(tensor) for tensor in tensors) else None


def _is_plain(x: Tensor) -> bool:
    """Returns True for contiguous fp32 in host memory; other tensor classes, as in a dry run, may have no memory."""
    plain = type(x) in (Tensor, nn.Parameter) and is_host(x.device)
    return plain and x.dtype == torch.float32 and x.is_contiguous()


def _places(*tensors: Tensor) -> Iterator[ctypes.c_void_p | ctypes.c_int64]:
    """Yields the addresses of tensors, then their common number of elements."""
    yield from (ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors)
    yield ctypes.c_int64(tensors[0].numel())


def _floats(*numbers: float) -> ctypes.Array[ctypes.c_float]:
    return (ctypes.c_float * len(numbers))(*numbers)
