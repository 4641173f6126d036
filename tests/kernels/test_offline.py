"""Every kernel compiles for GPUs that are not here: no spills, within its budget, matrix products on tensor cores.

``budgets.json`` has what each kernel took when it was last accepted; ``pytest tests/kernels/test_offline.py
--write-budgets`` accepts what it takes now. It also has a digest of all that decides that: code, without comments and
docstrings. Where the digest is still the same nothing is compiled, but in CI (``CI=1``) and ``-m long`` everything is.
"""

import ast
import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from hashlib import sha256
from importlib.metadata import version
from io import StringIO
from pathlib import Path
from tokenize import COMMENT, generate_tokens
from typing import Any

import pytest

BUDGETS = Path(__file__).parent / "budgets.json"
Check = Callable[[int, dict[str, Any]], None]
ARCHITECTURES = {80: 163_840, 90: 232_448, 100: 232_448}
"""Compute capability -> bytes of shared memory that a block can have."""


def code_of(source: str) -> str:
    """The lines of a module that are compiled: no comments, no docstrings, no blank lines."""
    lines = source.splitlines()
    for token in generate_tokens(StringIO(source).readline):
        if token.type == COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            for row in range(node.lineno, (node.end_lineno or node.lineno) + 1):
                lines[row - 1] = ""
    return "\n".join(line.rstrip() for line in lines if line.strip())


@cache
def digest() -> str:
    """Of the kernels, of how they are compiled here, and of Triton."""
    root = Path(__file__).parents[2]
    files = [*sorted((root / "kernels" / "gpu").rglob("*.py")), Path(__file__).with_name("offline.py")]
    found = sha256(version("triton").encode())
    for file in files:
        found.update(code_of(file.read_text(encoding="utf-8")).encode())
    return found.hexdigest()


def accepted(budgets: dict[str, Any]) -> bool:
    """Nothing has changed since all of these tests passed."""
    return budgets["digest"] == digest() and not os.environ.get("CI")


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
        BUDGETS.write_text(f'{{\n  "digest": "{digest()}",\n{text}\n}}\n', encoding="utf-8")
    read: dict[str, Any] = json.loads(BUDGETS.read_text(encoding="utf-8"))
    return read


def within_budget(arch: int, budgets: dict[str, Any]) -> None:
    allowed = budgets[f"sm_{arch}"]
    assert compiled(arch).keys() == allowed.keys()
    for name, took in compiled(arch).items():
        assert took["spilled_bytes"] == 0, f"{name} spills {took['spilled_bytes']} bytes"
        assert took["shared_bytes"] <= ARCHITECTURES[arch], name
        for what, most in allowed[name].items():
            assert took[what] <= most, f"{name} takes {took[what]} {what}, its budget is {most}"


def on_tensor_cores(arch: int, budgets: dict[str, Any]) -> None:
    instruction = {80: "mma", 90: "wgmma", 100: "tcgen05"}[arch]
    products = {name: took for name, took in compiled(arch).items() if took["dots"]}
    assert all(took[instruction] for took in products.values()), products


def by_tensor_memory_access(arch: int, budgets: dict[str, Any]) -> None:
    products = {name: took for name, took in compiled(arch).items() if name.startswith("product_kernel")}
    narrow = {name: took for name, took in products.items() if "fp32" not in name}
    # two operands in the loop, and the result
    assert narrow and all(took["tma"] >= 3 for took in narrow.values()), narrow


def orders_its_signals(arch: int, budgets: dict[str, Any]) -> None:
    """What waits acquires, what signals releases, over the whole system; without, a peer could see a tile too late."""
    found = compiled(arch)
    both = ("gather_product_kernel column both", "dispatch_product")
    waits = [name for name in found if name.startswith((*both, "gather_product", "sum_slots", "collect_", "multicast"))]
    sends = (*both, "product_scatter", "product_return", "forward_slots", "multicast")
    signals = [name for name in found if name.startswith(sends)]
    switched = 3 if arch >= 90 else 0
    # each wait looks at the signal, at who has ended, and at the signal again
    assert len(waits) == 14 + switched and all(found[name]["acquires"] >= 3 for name in waits), waits
    assert len(signals) == 20 + switched and all(found[name]["releases"] for name in signals), signals


def adds_by_the_switch(arch: int, budgets: dict[str, Any]) -> None:
    """Loads that add, stores that reach all, and a fence on either side of them."""
    switched = {name: took for name, took in compiled(arch).items() if took["multimem"]}
    assert sorted(switched) == [f"multicast_sum_kernel by switch {kind}" for kind in ("bf16", "fp16", "fp32")]
    # a thread of the 16-bit tile adds 8 times 16 bytes, one of the fp32 tile 4 times
    assert [took["multimem"] for _, took in sorted(switched.items())] == [16, 16, 8]
    assert all(took["alias_fences"] == 2 for took in switched.values())


CHECKS = [
    *((check, arch) for check in (within_budget, on_tensor_cores, orders_its_signals) for arch in ARCHITECTURES),
    (by_tensor_memory_access, 90),
    (by_tensor_memory_access, 100),
    (adds_by_the_switch, 90),
    (adds_by_the_switch, 100),
]


KERNEL = '''"""Module."""

@triton.jit
def kernel(x, N: tl.constexpr):
    """Adds one."""
    # a comment
    tl.store(x, tl.load(x) + 1)  # another
'''


@pytest.mark.parametrize(
    ("before", "after", "compiles"),
    [
        ("Adds one.", "Adds 1 to a number.", False),
        ("# another", "# a third", False),
        ("    # a comment\n", "\n", False),
        ("+ 1", "+ 2", True),
        ("N: tl.constexpr", "N", True),
    ],
)
def test_comments_and_docstrings_of_a_kernel_compile_nothing(before: str, after: str, compiles: bool) -> None:
    changed = KERNEL.replace(before, after)
    assert changed != KERNEL and (code_of(changed) != code_of(KERNEL)) == compiles


@pytest.mark.parametrize(("check", "arch"), CHECKS)
def test_kernels_that_have_changed_compile_as_before(check: Check, arch: int, budgets: dict[str, Any]) -> None:
    if not accepted(budgets):
        check(arch, budgets)


@pytest.mark.long
@pytest.mark.parametrize(("check", "arch"), CHECKS)
def test_every_kernel_compiles_as_before(check: Check, arch: int, budgets: dict[str, Any]) -> None:
    check(arch, budgets)
