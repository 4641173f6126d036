"""The kernel of the host gives torch's bits, wherever an element lies and whatever number it is."""

import ctypes
import logging
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.kernels.optim import host_update
from engine.kernels.optim.host_update import (
    CompileError,
    HostKernel,
    host_kernel,
    library,
    rounds_to,
    update_adam_,
    update_lion_,
)
from engine.kernels.optim.update_rules import AdamRule, LionRule, adam_, lion_
from engine.zero.optim.flat_optimizers import FlatAdam, FlatLion

SIZES = (0, 1, 7, 8, 15, 16, 33, 129, 1023, 20_011)
Update = Callable[[Tensor, Tensor, Tensor, Tensor], object]
"""(weights, gradient, two moments), in place."""


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostKernel]:
    """The kernel, compiled for this module, whether or not an update takes it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRINE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield host_kernel.__wrapped__() or HostKernel(ctypes.CDLL(str(library(host_update.SOURCE))), lanes=8)


@pytest.fixture
def used(kernel: HostKernel, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernel's rules as they are called; it takes tensors of any size."""
    called: list[str] = []

    class Noted(HostKernel):
        def adam(self, *arguments: Any) -> None:
            called.append("adam")
            super().adam(*arguments)

        def lion(self, *arguments: Any) -> None:
            called.append("lion")
            super().lion(*arguments)

    monkeypatch.setattr(host_update, "WORTH", 1)
    monkeypatch.setattr(host_update, "host_kernel", lambda: Noted(kernel.compiled, kernel.lanes))
    return called


@pytest.fixture(params=[1, 2, 4])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@cache
def numbers(size: int, seed: int) -> Tensor:
    """fp32 [size] of every magnitude, with zeros, denormals, infinities and NaN among them."""
    generator = torch.Generator().manual_seed(1000 * seed + size)
    bits = torch.randint(-(1 << 31), 1 << 31, (size,), generator=generator).to(torch.int32).view(torch.float32)
    near = torch.randn(size, generator=generator)
    kind = torch.randint(0, 8, (size,), generator=generator)
    chosen = torch.where(kind == 0, bits, near)
    for at, special in ((1, 0.0), (2, 1e-41), (3, -1e30)):
        chosen = torch.where(kind == at, torch.tensor(special), chosen)
    return chosen


def assert_same_bits(ours: Tensor, theirs: Tensor) -> None:
    """NaN equals NaN: which of its bits an operation passes on depends on the order of its operands."""
    number = ~theirs.isnan()
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert torch.equal(ours[number].view(torch.int32), theirs[number].view(torch.int32))


def compare(ours: Update, theirs: Update) -> None:
    for size in SIZES:
        given = [numbers(size, seed) for seed in range(4)]
        given[3] = given[3].abs()
        here, there = ([tensor.clone() for tensor in given] for _ in range(2))
        ours(*here)
        theirs(*there)
        for a, b in zip(here, there, strict=True):
            assert_same_bits(a, b)


ADAM = [
    AdamRule(3e-3, betas, eps, decay, decoupled, corrected)
    for betas, eps, corrected in (
        ((0.9, 0.999), 1e-8, True),
        ((0.5, 0.95), 0.0, False),
        ((0.2, 0.3), 1e-8, True),
    )
    for decay, decoupled in ((0.0, True), (0.1, True), (0.1, False))
]
LION = [LionRule(3e-4, betas, decay) for betas in ((0.9, 0.99), (0.4, 0.3)) for decay in (0.0, 0.1)]


def test_a_sample_has_torchs_bits(kernel: HostKernel) -> None:
    assert host_update.has_bits_of_torch(kernel)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("rule", ADAM, ids=str)
def test_adam_has_torchs_bits(kernel: HostKernel, rule: AdamRule) -> None:
    def theirs(w: Tensor, g: Tensor, m: Tensor, v: Tensor, step: int) -> None:
        adam_([w], [g], [m], [v], step, rule)

    for step in (1, 1000):
        compare(partial(kernel.adam, step=step, rule=rule), partial(theirs, step=step))


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("rule", LION, ids=str)
def test_lion_has_torchs_bits(kernel: HostKernel, rule: LionRule) -> None:
    compare(lambda w, g, m, v: kernel.lion(w, g, m, rule), lambda w, g, m, v: lion_([w], [g], [m], rule))


@pytest.mark.usefixtures("threads")
def test_what_is_written_into_rounded_weights_is_seen(kernel: HostKernel) -> None:
    for size in SIZES:
        wide = numbers(size, 5).nan_to_num()
        narrow = wide.bfloat16()
        assert kernel.rounds_to(wide, narrow)
        for place in {0, size // 2, size - 1} if size else ():
            written = narrow.clone()
            written.view(torch.int16)[place] += 1
            assert not kernel.rounds_to(wide, written)
            unknown = wide.clone()
            unknown[place] = torch.nan
            assert not kernel.rounds_to(unknown, unknown.bfloat16())


def test_every_fp32_number_between_two_of_bf16_is_rounded_as_torch_does(kernel: HostKernel) -> None:
    wide = torch.arange(0x3F7E0000, 0x3F820000, dtype=torch.int32).view(torch.float32)
    assert kernel.rounds_to(wide, wide.bfloat16()) and kernel.rounds_to(-wide, -wide.bfloat16())


def test_rounded_weights_are_looked_at_by_it(used: list[str]) -> None:
    wide = torch.randn(77)
    assert rounds_to(wide, wide.bfloat16()) and not rounds_to(wide, (2 * wide).bfloat16())
    assert not rounds_to(wide, wide.half()) and not rounds_to(wide.double(), wide.bfloat16())
    assert not used


@pytest.mark.long
@pytest.mark.parametrize("step", [1, 2, 3, 10, 100, 1000, 5000])
def test_every_root_is_divided_as_torch_does(kernel: HostKernel, step: int) -> None:
    rule = AdamRule(1.0, (0.9, 0.999), 0.0, 0.0, True)
    second = torch.arange(0x3F800000, 0x40800000, dtype=torch.int32).view(torch.float32)  # all of [1, 4)
    ours, theirs = ([torch.zeros_like(second), torch.ones_like(second), second.clone()] for _ in range(2))
    grad = torch.zeros_like(second)
    kernel.adam(ours[0], grad, ours[1], ours[2], step, rule)
    adam_(theirs[:1], [grad], theirs[1:2], theirs[2:], step, rule)
    assert_same_bits(ours[0], theirs[0])


@pytest.mark.parametrize(("kind", "name"), [(FlatAdam, "adam"), (FlatLion, "lion")])
def test_optimizers_update_by_it(kind: type, name: str, used: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def trained() -> Tensor:
        torch.manual_seed(0)
        weights = torch.nn.Parameter(torch.randn(77))
        optimizer = kind([weights], lr=0.1, weight_decay=0.1)
        for _ in range(3):
            weights.grad = torch.randn(77)
            optimizer.step()
        return weights.detach()

    ours = trained()
    assert used == [name] * 3
    monkeypatch.setattr(host_update, "host_kernel", lambda: None)
    assert_same_bits(ours, trained())


def test_what_it_does_not_support_is_torchs(used: list[str]) -> None:
    rule = AdamRule(0.1, (0.9, 0.99), 1e-8, 0.1, True)
    for given in (torch.ones(4, 8, dtype=torch.float64), torch.ones(8, 2)[:, 0].unsqueeze(0).repeat(4, 1).T):
        w, g, m, v = (given.clone(memory_format=torch.preserve_format) for _ in range(4))
        update_adam_([w], [g], [m], [v], 1, rule)
        assert (w < 1).all()
    update_lion_([], [], [], LionRule(0.1, (0.9, 0.99), 0.0))
    assert not used


SOURCE = 'extern "C" int answer() { return 42; }\n'


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source that compiles fast; what is compiled is kept in a folder of the test."""
    monkeypatch.setenv("TRINE_CACHE", str(tmp_path / "cache"))
    written = tmp_path / "answer.cpp"
    written.write_text(SOURCE)
    return written


@pytest.fixture
def compilations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with one line for every time that the compiler has compiled."""
    noted, compiler = tmp_path / "compilations", tmp_path / "compiler"
    compiler.write_text(f'#!/bin/sh\ncase "$*" in *.cpp*) echo once >> {noted}; sleep 0.3;; esac\nexec g++ "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    noted.touch()
    return noted


def answer(made: Path | None) -> int:
    assert made is not None
    return int(ctypes.CDLL(str(made)).answer())


def test_it_is_compiled_once(source: Path, compilations: Path) -> None:
    made = library(source)
    assert answer(made) == 42 and library(source) == made
    assert compilations.read_text() == "once\n"


def test_another_source_or_cpu_is_another_library(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = library(source)
    monkeypatch.setattr(host_update, "_cpu", lambda: b"another")
    second = library(source)
    source.write_text(SOURCE.replace("42", "43"))
    third = library(source)
    assert len({first, second, third}) == 3 and answer(third) == 43


@pytest.mark.parametrize("damage", [b"", b"\x7fELF and nothing else", None])
def test_a_damaged_library_is_made_anew(source: Path, damage: bytes | None) -> None:
    made = library(source)
    assert made is not None
    whole = made.read_bytes()
    made.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]) if damage is None else damage)
    assert answer(library(source)) == 42
    assert [found.read_bytes() for found in made.parent.glob("*.so")] == [whole]


def test_of_two_processes_one_compiles(source: Path, compilations: Path) -> None:
    module = "engine.kernels.optim.host_update"
    code = f"from pathlib import Path; from {module} import library; print(library(Path({str(source)!r})))"
    both = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    made = [process.communicate()[0].strip() for process in both]
    assert made[0] == made[1] and answer(Path(made[0])) == 42
    assert compilations.read_text() == "once\n"


def test_nothing_is_kept_if_the_cache_is_off(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRINE_CACHE", "0")
    assert library(source) is None and host_kernel.__wrapped__() is None


@pytest.mark.parametrize("why", ["there is no C++ compiler", "refuses to compile it", "cannot be read"])
def test_without_a_library_torch_updates_and_it_is_said_once(
    why: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if why == "there is no C++ compiler":
        monkeypatch.setenv("CXX", "no-such-compiler")
    elif why == "refuses to compile it":
        source.write_text("no C++\n")
    else:
        (tmp_path / "cache").write_text("a file where the folder should be")
    monkeypatch.setattr(host_update, "SOURCE", source)
    monkeypatch.setattr(host_update, "WORTH", 1)
    host_kernel.cache_clear()
    rule, generator = AdamRule(0.1, (0.9, 0.99), 1e-8, 0.1, True), torch.Generator().manual_seed(0)
    given = torch.randn(4, 33, generator=generator).square()
    ours, theirs = list(given.clone()), list(given.clone())
    with caplog.at_level(logging.WARNING, logger="trine"):
        for step in (1, 2):
            update_adam_(ours[:1], ours[1:2], ours[2:3], ours[3:], step, rule)
            adam_(theirs[:1], theirs[1:2], theirs[2:3], theirs[3:], step, rule)
    host_kernel.cache_clear()
    assert all(map(torch.equal, ours, theirs))
    assert len(caplog.messages) == 1 and why in caplog.messages[0]
    with pytest.raises(CompileError, match=re.escape(why)):
        library(source)


def test_a_kernel_with_other_bits_is_not_used(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = host_update.SOURCE.read_text()
    source.write_text(text.replace("-by.step_size *", "-by.step_size * 1.000001f *"))
    monkeypatch.setattr(host_update, "SOURCE", source)
    assert host_kernel.__wrapped__() is None
