"""Versions of what the engine stands on: an environment for each row, and what passes in it.

    python -m tests.versions FOLDER [--only ROW ..] [--checks CHECK ..] [--keep] [--write-figures]
                              [--python 3.12=/path/to/python3.12]

Environments are made in FOLDER one after another (virtual environments with CUDA wheels, some 5 GB each), from the
packages of the row alone, as a GPU machine has them; an environment is deleted after its checks unless ``--keep`` is
given, and one that is there is used again. Rows cover pairs of versions that are likely to disagree, not the product. A
row whose packages cannot be installed here says why. Exit code 1 if a check fails.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from benchmarks.harness.figures import record_cells

ROOT = Path(__file__).parents[1]
BESIDE = (
    "safetensors==0.8.0", "xxhash==4.1.0", "accelerate==1.15.0", "peft==0.21.2", "pytest==9.2.0", "pytest-xdist==3.8.0",
)  # fmt: skip
"""The other packages of the GPU machine."""
SECONDS = 900.0
"""The limit of a check, and of an installation."""
LENGTH = 160
"""Characters of a line in a cell."""
ABSENT = "not here"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The versions of an environment."""

    python: str
    torch: str
    triton: str
    transformers: str
    numpy: str
    first_contact: bool = False
    """All parts of a first contact run here besides."""

    @property
    def versions(self) -> dict[str, str]:
        """The versions by name."""
        return {
            "Python": self.python, "torch": self.torch, "Triton": self.triton, "transformers": self.transformers,
            "numpy": self.numpy,
        }  # fmt: skip


ROWS: Mapping[str, Row] = MappingProxyType(
    {
        "device": Row(
            python="3.12", torch="2.11.0", triton="3.6.0", transformers="5.17.0", numpy="2.4.6", first_contact=True
        ),
        "oldest": Row(python="3.11", torch="2.11.0", triton="3.6.0", transformers="5.20.0", numpy="2.3.5"),
        "2.12": Row(python="3.12", torch="2.12.1", triton="3.7.1", transformers="5.17.0", numpy="2.5.2"),
        "tested": Row(python="3.11", torch="2.13.0", triton="3.7.1", transformers="5.23.0", numpy="2.4.6"),
        "old Triton": Row(python="3.11", torch="2.13.0", triton="3.6.0", transformers="5.24.0", numpy="2.3.5"),
        "new Triton": Row(python="3.11", torch="2.13.0", triton="3.8.0", transformers="5.17.0", numpy="2.4.6"),
        "newest": Row(python="3.12", torch="2.14.1", triton="3.8.0", transformers="5.24.0", numpy="2.5.2"),
        "new torch": Row(python="3.11", torch="2.14.1", triton="3.8.0", transformers="5.23.0", numpy="2.3.5"),
    }
)
_ANY = ("-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-m", "long or not long")
_OPERATORS = "tests/kernels/ops/"
_PARITY = "tests/engine/parity/"
CHECKS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "import": ("-W", "error", "-c", "import engine; engine.initialize; print('imported')"),
        "GPU tests are collected": ("-m", "pytest", "-m", "gpu", "--collect-only", "-q", "-p", "no:cacheprovider"),
        "one rank": (
            *_ANY,
            "tests/engine/test_engine.py::test_loss_falls_and_report_is_complete",
            "tests/engine/test_engine.py::test_three_calls_equal_train_batch",
            "tests/engine/test_engine.py::test_optimizer_and_scheduler_of_the_user",
        ),
        "dp2 x tp2": (*_ANY, f"{_PARITY}test_parity_axes.py::test_triton_kernels_on_a_grid[llama-dp2 x tp2-False]"),
        "pp2": (
            *_ANY,
            f"{_PARITY}test_axes.py::test_other_lengths_in_later_batches[llama-pp2]",
            f"{_PARITY}test_axes.py::test_iterators_and_tuples[nano-pp2]",
        ),
        "ZeRO 3": (*_ANY, f"{_PARITY}test_parity_zero.py::test_every_model_on_every_grid_in_all_modes[llama-dp2]"),
        "kernels": (
            *_ANY, "tests/kernels/test_interpreter.py", f"{_OPERATORS}test_norm.py",
            f"{_OPERATORS}test_rotary.py", f"{_OPERATORS}test_adamw.py", "-k", "not registered_as_torch_wants",
        ),
        "opcheck": (*_ANY, _OPERATORS, "-k", "registered_as_torch_wants"),
        "checkpoint": (
            *_ANY,
            "tests/engine/checkpoint/test_checkpoint.py::test_a_run_goes_on_bit_for_bit",
            "tests/engine/checkpoint/test_grids.py::test_pairs_of_grids",
        ),
        "kernels ahead": (
            *_ANY,
            "tests/launch/planner/test_compile_command.py::test_a_second_call_finds_every_kernel_in_the_cache",
            "tests/launch/planner/test_compile_command.py::test_kernels_noted_on_shapes_are_those_that_an_engine_launches",
        ),
        "benchmarks step": (
            *_ANY,
            "tests/benchmarks/training/test_step.py::test_a_tiny_run_has_all_rows_and_equal_losses",
        ),
        "plan": (*_ANY, "tests/launch/planner/test_plan_command.py", "-k", "folder or built_in"),
        "Trainer": (
            *_ANY, "tests/engine/huggingface/test_trainer.py", "-k", "logs_are and (alone or tp2 or zero3) and not x",
        ),
    }
)  # fmt: skip
"""Arguments of Python in the root of the source."""
FIRST_CONTACT = "first contact"
CONTACT = ("-m", "benchmarks", "first_contact", "--device", "cpu")
"""All parts that need no GPU."""
_EVERY = (*CHECKS, FIRST_CONTACT)
Run = Callable[[Sequence[str], float], tuple[int, str]]


def run(command: Sequence[str], seconds: float) -> tuple[int, str]:
    """Run a command in the root of the source; return its exit code, and the line that tells the most."""
    own = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=seconds, check=False, env=os.environ | own
        )
    except subprocess.TimeoutExpired:
        return 124, f"not done in {seconds:.0f} s"
    except OSError as error:
        return 127, str(error)
    lines = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"E  +\w|ERROR|.*Error: ", line)] if done.returncode else []
    return done.returncode, (errors or lines or [""])[-1]


@dataclass(frozen=True, slots=True)
class Environments:
    """Makes environments in ``folder``."""

    folder: Path
    pythons: Mapping[str, str]
    """Commands by version, where they are not ``pythonVERSION``."""
    launch: Run = run

    def make(self, name: str) -> str:
        """Make the environment of a row; return why there is none, empty if there is."""
        row, folder = ROWS[name], self.path(name)
        if (folder / "made").exists():
            return ""
        pip = (str(folder / "bin" / "python"), "-m", "pip", "install", "-q", "--no-cache-dir")
        packages = f"torch=={row.torch}", f"transformers=={row.transformers}", f"numpy=={row.numpy}"
        commands = [
            (self.pythons.get(row.python, f"python{row.python}"), "-m", "venv", "--clear", str(folder)),
            (*pip, *packages, *BESIDE),
            (*pip, "--no-deps", f"triton=={row.triton}"),  # torch's CUDA wheels ask for one version of it
        ]
        for command in commands:
            code, last = self.launch(command, SECONDS)
            if code:
                return last or f"exit code {code}"
        (folder / "made").touch()
        return ""

    def path(self, name: str) -> Path:
        """Return the folder of the environment of a row."""
        return self.folder / name.replace(" ", "-")

    def examine(self, name: str, only: Collection[str] = ()) -> dict[str, str]:
        """Return what each check says in the environment of a row; ``only`` names some of them."""
        if absent := self.make(name):
            return {"import": f"{ABSENT}: {_cell(absent)}"}
        checks = {**CHECKS, **({FIRST_CONTACT: CONTACT} if ROWS[name].first_contact else {})}
        return {check: self._check(name, checks[check]) for check in checks if not only or check in only}

    def _check(self, name: str, arguments: Sequence[str]) -> str:
        began = time.monotonic()
        code, last = self.launch([str(self.path(name) / "bin" / "python"), *arguments], SECONDS)
        if code:
            return f"**failed**: {_cell(last)}"
        counted = re.search(r"\d+ (?:passed|tests? collected|ok)", last)
        return f"{counted[0] if counted else 'ok'}, {time.monotonic() - began:.0f} s"


def _cell(line: str) -> str:
    return line.replace("|", "/")[:LENGTH]


def cells(found: Mapping[str, Mapping[str, str]]) -> dict[tuple[str, str], str]:
    """Return a column for each environment: its versions, then what each check says."""
    return {
        (line, name): told
        for name, row in found.items()
        for line, told in (ROWS[name].versions | {check: row[check] for check in _EVERY if check in row}).items()
    }


def main(command: Sequence[str]) -> int:
    """Make the environments, check them, tell what passes; 1 if a check has failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.versions")
    parser.add_argument("folder", type=Path, help="where the environments are")
    parser.add_argument("--only", nargs="+", choices=[*ROWS], default=[*ROWS], metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--checks", nargs="+", choices=_EVERY, default=[], metavar="CHECK", help=", ".join(_EVERY))
    parser.add_argument("--keep", action="store_true", help="leave environments, for the next call")
    parser.add_argument("--python", nargs="+", default=[], metavar="VERSION=COMMAND", help="other than pythonVERSION")
    parser.add_argument("--write-figures", action="store_true", help="keep the table in docs/figures and show it")
    given = parser.parse_args(command)
    environments = Environments(given.folder.absolute(), dict(one.split("=", 1) for one in given.python))
    found: dict[str, dict[str, str]] = {}
    for name in given.only:
        found[name] = environments.examine(name, given.checks)
        lines = [f"    {check:24s}{told}" for check, told in found[name].items()]
        print(f"{name}: {ROWS[name].versions}", *lines, sep="\n", flush=True)
        if given.write_figures:
            record_cells("versions", "", cells({name: found[name]}))
        if not given.keep:
            shutil.rmtree(environments.path(name), ignore_errors=True)
    return int(any("**failed**" in cell for row in found.values() for cell in row.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
