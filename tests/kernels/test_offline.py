"""Every kernel compiles for GPUs that are not here: no spills, within its budget, matrix products on tensor cores.

``budgets.json`` has what each kernel took when it was last accepted; ``pytest tests/kernels/test_offline.py
--write-budgets`` accepts what it takes now.
"""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

BUDGETS = Path(__file__).parent / "budgets.json"
ARCHITECTURES = {80: 163_840, 90: 232_448}
"""Compute capability -> bytes of shared memory that a block can have."""


@cache
def compiled(arch: int) -> dict[str, dict[str, int]]:
    """What each kernel takes, found in a process of its own that does not interpret."""
    own = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.offline", str(arch)]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, env=own, timeout=280)
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, int]] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def budgets(request: pytest.FixtureRequest) -> dict[str, Any]:
    if request.config.getoption("--write-budgets"):
        accepted = {
            f"sm_{arch}": {
                name: {"registers": took["registers"], "shared_bytes": took["shared_bytes"]}
                for name, took in sorted(compiled(arch).items())
            }
            for arch in ARCHITECTURES
        }
        rows = {
            arch: ",\n".join(f"    {json.dumps(name)}: {json.dumps(took)}" for name, took in kernels.items())
            for arch, kernels in accepted.items()
        }
        text = ",\n".join(f"  {json.dumps(arch)}: {{\n{lines}\n  }}" for arch, lines in rows.items())
        BUDGETS.write_text(f"{{\n{text}\n}}\n", encoding="utf-8")
    read: dict[str, Any] = json.loads(BUDGETS.read_text(encoding="utf-8"))
    return read


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_kernel_compiles_within_its_budget(arch: int, budgets: dict[str, Any]) -> None:
    allowed = budgets[f"sm_{arch}"]
    assert compiled(arch).keys() == allowed.keys()
    for name, took in compiled(arch).items():
        assert took["spilled_bytes"] == 0, f"{name} spills {took['spilled_bytes']} bytes"
        assert took["shared_bytes"] <= ARCHITECTURES[arch], name
        for what, most in allowed[name].items():
            assert took[what] <= most, f"{name} takes {took[what]} {what}, its budget is {most}"


@pytest.mark.parametrize(("arch", "instruction"), [(80, "mma"), (90, "wgmma")])
def test_matrix_products_run_on_tensor_cores(arch: int, instruction: str) -> None:
    products = {name: took for name, took in compiled(arch).items() if took["dots"]}
    assert all(took[instruction] for took in products.values()), products


def test_tiles_come_by_tensor_memory_access_where_there_is_one() -> None:
    products = {name: took for name, took in compiled(90).items() if name.startswith("product_kernel")}
    narrow = {name: took for name, took in products.items() if "fp32" not in name}
    # two operands in the loop, and the result
    assert narrow and all(took["tma"] >= 3 for took in narrow.values()), narrow
