"""Updates of fp32 arrays on the host by a kernel of our own (``host_update.cpp``), in one pass over memory.

It takes calls over at least :data:`WORTH` elements, of contiguous fp32 tensors; torch's rules take all others
(``update_rules``). It is used only where a sample has torch's bits, so ranks may differ in whether they have it, and a
user who has no compiler misses nothing but time. It also tells whether bf16 weights are still their rounded masters.

C++ for the host that is compiled at its first use and kept: in ``~/.cache/trine/compiled``, or below the folder that
the environment variable TRINE_CACHE names; ``TRINE_CACHE=0`` keeps nothing, so nothing is compiled.

A kept file is named by a digest of its source, flags, compiler and CPU, and by one of its own content: a file that was
damaged, or made for another CPU that shares the home, is never loaded. One process compiles and the others wait.
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
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),  # none of which changes a bit of a result
)
_LONGEST = 120.0
"""Seconds that a compiler may take."""


class CompileError(Exception):
    """There is no library; its text is the middle of a sentence that says why."""


def library(source: Path) -> Path | None:
    """Path of the compiled ``source``; None if nothing may be kept. Compiling takes seconds, finding milliseconds.

    Raises:
        CompileError: there is no compiler, it refuses, or its result cannot be kept.
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
    """The kept file, if it is as it was made; others of its name are deleted."""
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
"""Elements of a call from which on the kernel is used, and compiled at its first use: smaller arrays lie in caches."""
SOURCE = Path(__file__).with_name("host_update.cpp")
_Update = Callable[..., object]
_LANES = (8, 16, 4)
"""Elements of a vector of torch's kernels, by their likelihood."""


def update_adam_(
    weights: Sequence[Tensor],
    grads: Sequence[Tensor],
    first_moments: Sequence[Tensor],
    second_moments: Sequence[Tensor],
    step: int,
    rule: AdamRule,
) -> None:
    """``adam_``, with the same bits: by the kernel on the host, by torch elsewhere."""
    kernel = _kernel_for((*weights, *grads, *first_moments, *second_moments), len(weights))
    if kernel is None:
        adam_(weights, grads, first_moments, second_moments, step, rule)
        return
    for w, g, m, v in zip(weights, grads, first_moments, second_moments, strict=True):
        kernel.adam(w, g, m, v, step, rule)


def update_lion_(weights: Sequence[Tensor], grads: Sequence[Tensor], momenta: Sequence[Tensor], rule: LionRule) -> None:
    """``lion_``, with the same bits: by the kernel on the host, by torch elsewhere."""
    kernel = _kernel_for((*weights, *grads, *momenta), len(weights))
    if kernel is None:
        lion_(weights, grads, momenta, rule)
        return
    for w, g, m in zip(weights, grads, momenta, strict=True):
        kernel.lion(w, g, m, rule)


def rounds_to(wide: Tensor, narrow: Tensor) -> bool:
    """True if fp32 ``wide`` rounded to bf16 is ``narrow``, of equal size; False if not, or without the kernel."""
    kernel = _kernel_for((wide,), 1) if narrow.dtype == torch.bfloat16 and is_host(narrow.device) else None
    return kernel is not None and narrow.is_contiguous() and kernel.rounds_to(wide, narrow)


@dataclass(frozen=True, slots=True)
class HostKernel:
    """The compiled rules. All tensors are contiguous, fp32, of equal size and on the host."""

    compiled: ctypes.CDLL
    lanes: int
    """Elements of torch's vectors, which decide how the last elements of a span are computed."""

    def adam(self, w: Tensor, g: Tensor, m: Tensor, v: Tensor, step: int, rule: AdamRule) -> None:
        """Makes update number ``step`` of ``w`` and both moments."""
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
        """Updates ``w`` and its momentum."""
        beta1, beta2 = rule.betas
        numbers = _floats(rule.lr, 1 - rule.lr * rule.weight_decay, 1 - beta1, 1 - beta2)
        self.compiled.trine_lion(*_places(w, g, m), numbers, self._spans()[0])

    def rounds_to(self, wide: Tensor, narrow: Tensor) -> bool:
        """Returns True if ``wide`` rounded to bf16 equals ``narrow``; False if there is a NaN."""
        places = ctypes.c_void_p(wide.data_ptr()), ctypes.c_void_p(narrow.data_ptr())
        return bool(self.compiled.trine_rounds_to(*places, ctypes.c_int64(wide.numel()), self._spans()[0]))

    def _spans(self) -> tuple[ctypes.c_int64, ctypes.c_int64]:
        """Returns torch's division of an array: the number of threads, and the elements of a vector."""
        return ctypes.c_int64(torch.get_num_threads()), ctypes.c_int64(self.lanes)


@cache
def host_kernel() -> HostKernel | None:
    """The kernel; None where it cannot be compiled, which is said once, or has other bits than torch."""
    try:
        made = library(SOURCE)
        compiled = ctypes.CDLL(str(made)) if made is not None else None
    except (CompileError, OSError) as error:
        logger.warning(
            "updates on the host are torch's, because their own kernel was not compiled: %s; the numbers are the same, "
            "only slower.",
            error,
        )
        return None
    if compiled is None:
        return None
    for lanes in _LANES:
        kernel = HostKernel(compiled, lanes)
        if has_bits_of_torch(kernel):
            return kernel
    logger.info("updates on the host are torch's, because their own kernel gives other bits on this CPU.")
    return None


def has_bits_of_torch(kernel: HostKernel) -> bool:
    """Returns True if every rule of the kernel gives torch's bits on a sample of odd length.

    The remainder at its end differs with the width of vectors.
    """
    w, g, m, v = torch.randn(4, 1021, generator=torch.Generator().manual_seed(0)).unbind()
    v = v.square()
    return all(_agree(ours, theirs, (w, g, m, v)) for ours, theirs in _pairs(kernel))


def _pairs(kernel: HostKernel) -> Iterator[tuple[_Update, _Update]]:
    """Updates of (weights, gradient, two moments) by the kernel and by torch."""
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
    """The kernel, for a call that updates the first ``updated`` of these tensors, if it supports and is worth it."""
    if sum(tensor.numel() for tensor in tensors[:updated]) < WORTH:
        return None
    return host_kernel() if all(_is_plain(tensor) for tensor in tensors) else None


def _is_plain(x: Tensor) -> bool:
    """Contiguous fp32 in memory of the host: a rehearsal has tensors of other classes, which only claim to be there."""
    plain = type(x) in (Tensor, nn.Parameter) and is_host(x.device)
    return plain and x.dtype == torch.float32 and x.is_contiguous()


def _places(*tensors: Tensor) -> Iterator[ctypes.c_void_p | ctypes.c_int64]:
    """Addresses of tensors, and how many elements each has."""
    yield from (ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors)
    yield ctypes.c_int64(tensors[0].numel())


def _floats(*numbers: float) -> ctypes.Array[ctypes.c_float]:
    return (ctypes.c_float * len(numbers))(*numbers)
