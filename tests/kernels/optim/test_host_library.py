"""C++ of the host is compiled once for each source, compiler and CPU, whole or not at all, and nobody needs it."""

import ctypes
import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine.kernels.optim import host_update
from engine.kernels.optim.host_update import CompileError, host_kernel, library, update_adam_
from engine.kernels.optim.update_rules import AdamRule, adam_

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


@pytest.mark.parametrize("why", ["there is no C++ compiler", "refuses to compile it", "is not to be had"])
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
