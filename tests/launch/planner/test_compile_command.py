"""``trine compile``: what is noted on shapes is what an engine launches, and lies in Triton's cache afterwards."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from engine.launch.cli import main
from tests.launch.planner.launched_kernels import CASES

ROOT = Path(__file__).parents[3]
OFTEN = ("decoder fp32",)
"""A model that imports no library; ``-m long`` has the others."""
SIZES = ("--layers", "1", "--width", "32", "--heads", "2", "--context", "16", "--vocabulary", "32")
TRINE = ("-c", "import sys; from engine.launch.cli import main; sys.exit(main(sys.argv[1:]))", "compile")
THRICE = (
    "-c",
    "import sys; from engine.launch.cli import main; "
    "sys.exit(sum(main([*sys.argv[1:], '--gpu', gpu]) for gpu in ('h100', 'h100', 'mi300x')))",
    "compile",
)
"""In one process, which imports once: other processes compile."""


def compiling(*command: str, cache: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run Python where Triton compiles, with a cache of its own."""
    own = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    own |= {"TRITON_CACHE_DIR": str(cache)} if cache else {}
    return subprocess.run([sys.executable, *command], cwd=ROOT, env=own, capture_output=True, text=True, check=False)


def told(*cases: str) -> Mapping[str, Any]:
    """Return the comparison of some cases."""
    done = compiling("-m", "tests.launch.planner.launched_kernels", *cases)
    assert done.returncode == 0, done.stderr[-3000:]
    found: Mapping[str, Any] = json.loads(done.stdout)
    return found


def assert_same(found: Mapping[str, Any]) -> None:
    for name, case in found.items():
        assert not case["noted alone"] and not case["launched alone"], (name, case)
        assert {"norm_forward_kernel", "product_kernel", "squared_norm_kernel"} <= set(case["both"]), name


def test_kernels_noted_on_shapes_are_those_that_an_engine_launches() -> None:
    assert_same(told(*OFTEN))


@pytest.mark.long
def test_so_are_those_of_other_dtypes_optimizers_and_recomputation() -> None:
    assert_same(told(*(name for name in CASES if name not in OFTEN)))


def test_a_second_call_finds_every_kernel_in_the_cache(tmp_path: Path) -> None:
    """A third call is for a GPU without a compiler here, and is refused."""
    config, cache = tmp_path / "config.json", tmp_path / "cache"
    config.write_text(json.dumps({"train_batch_size": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}))
    done = compiling(*THRICE, str(config), *SIZES, "--processes", "1", cache=cache)
    assert done.returncode == 1 and "compiled ahead for a100, b200, h100, h200" in done.stderr, done.stderr[-3000:]
    count = len(list(cache.glob("*/*.cubin")))
    lines = [line for line in done.stdout.splitlines() if " of " not in line[:20]]  # progress on a busy machine
    assert len(lines) == 6 and all(line.startswith("model      the built-in decoder: ") for line in lines[::3])
    assert all(line.startswith(f"noted      {count} kernels") for line in lines[1::3])
    assert f"compiled   {count} kernels, " in lines[2] and lines[2].endswith(f"; 0 were in Triton's cache, {cache}")
    assert lines[5] == f"compiled   nothing: all {count} are in Triton's cache, {cache}"


@pytest.mark.long
def test_the_kernels_of_a_script(tmp_path: Path) -> None:
    sizes = ("--width", "32", "--layers", "1", "--heads", "2", "--context", "16", "--out", str(tmp_path / "run"))
    done = compiling(*TRINE, "train.py", "--", *sizes, cache=tmp_path / "cache")
    assert done.returncode == 0, done.stderr[-3000:]
    assert {"adamw_kernel", "norm_backward_kernel"} <= {file.stem for file in (tmp_path / "cache").glob("*/*.cubin")}


def test_an_interpreter_has_no_cache(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compile", str(tmp_path / "config.json")]) == 1
    assert "TRITON_INTERPRET is set; unset it" in capsys.readouterr().err
