"""``pytest -m gpu`` with torch, triton, transformers and pytest, and nothing else of the packages that tests use."""

import os
import re
import subprocess
import sys
import tomllib
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

ROOT = Path(__file__).parents[1]
THERE = ("torch", "triton", "transformers", "pytest")
"""Packages of a GPU machine, with all that they require."""
COLLECT = """
import importlib.machinery, sys

class Lacking(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        lacks = name.partition(".")[0] in sys.argv[1].split(",")
        return None if lacks else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(importlib.machinery.PathFinder)] = Lacking
import pytest
sys.exit(pytest.main(["-m", "gpu", "--collect-only", "-q"]))
"""


def test_gpu_tests_are_collected_without_the_other_packages() -> None:
    hidden = ",".join(sorted(hidden_modules()))
    assert {"jsonschema", "datasets", "accelerate", "hypothesis"} <= set(hidden.split(","))
    done = subprocess.run(
        [sys.executable, "-c", COLLECT, hidden],
        cwd=ROOT,
        env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},  # plugins are found by their metadata, which is there
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = {line.partition("::")[0] for line in done.stdout.splitlines() if "::" in line}
    assert found == {f"tests/gpu/{file.name}" for file in (ROOT / "tests" / "gpu").glob("test_*.py")}


def hidden_modules() -> set[str]:
    """Return modules of the packages that the tests ask for and a GPU machine may lack."""
    asked = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    there = required((*THERE, *map(distribution, asked["dependencies"])))
    lacking = {distribution(line) for line in asked["optional-dependencies"]["test"]} - there
    return {
        module
        for module, owners in packages_distributions().items()
        if lacking & {distribution(owner) for owner in owners}
    }


def required(names: tuple[str, ...]) -> set[str]:
    """Return ``names`` and what they require, directly or not."""
    found: set[str] = set()
    left = list(names)
    while left:
        name = left.pop()
        if name not in found:
            found.add(name)
            with suppress(PackageNotFoundError):  # required on another system, or by another Python
                left += [distribution(line) for line in requires(name) or () if "extra ==" not in line]
    return found


def distribution(line: str) -> str:
    """Return the normal name of the distribution that a requirement asks for."""
    match = re.match(r"[\w.-]+", line)
    assert match is not None
    return match.group().lower().replace("_", "-").replace(".", "-")
