"""Versions of what the engine stands on: an environment for each row, and what passes in it.

    python -m tests.versions FOLDER [--only ROW ..] [--out TABLE.md]

Environments are made in FOLDER (virtual environments; those that are there are used again) from the packages of the
row alone, as a GPU machine has them. A row whose packages cannot be installed here says so. Exit code 1 if a check
fails.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

ROOT = Path(__file__).parents[1]
BESIDE = ("safetensors==0.8.0", "xxhash==4.1.0", "pytest==9.2.0")
SECONDS = 900.0
"""The limit of a check."""


@dataclass(frozen=True, slots=True)
class Row:
    """The packages of an environment, and the command of its Python."""

    packages: tuple[str, ...]
    python: str = "python3.11"

    @property
    def title(self) -> str:
        """The packages in words."""
        return ", ".join([self.python.replace("python", "Python "), *(one.replace("==", " ") for one in self.packages)])


ROWS: Mapping[str, Row] = MappingProxyType(
    {
        "device": Row(("torch==2.11.0+cpu", "triton==3.6.0", "transformers==5.17.0", "numpy==2.4.6"), "python3.12"),
        "oldest": Row(("torch==2.11.0+cpu", "triton==3.6.0", "transformers==5.17.0", "numpy==2.3.5")),
        "old Triton": Row(("torch==2.13.0+cpu", "triton==3.6.0", "transformers==5.17.0", "numpy==2.4.6")),
        "tested": Row(("torch==2.13.0+cpu", "triton==3.7.1", "transformers==5.23.0", "numpy==2.4.6")),
        "newest": Row(("torch==2.14.1+cpu", "triton==3.8.0", "transformers==5.24.0", "numpy==2.5.2"), "python3.12"),
    }
)
_PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider")
CHECKS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "import": ("-W", "error", "-c", "import engine; engine.initialize"),
        "kernels": (*_PYTEST, "tests/kernels/test_fused_operator.py", "tests/kernels/ops", "tests/kernels/optim"),
        "engine": (*_PYTEST, "tests/engine/test_axis_order.py", "tests/zero/test_fewer_bits.py"),
        "first contact": ("-m", "benchmarks", "first_contact", "--device", "cpu"),
    }
)
"""Arguments of Python in the root of the source."""
Run = Callable[[Sequence[str], float], tuple[int, str]]


def run(command: Sequence[str], seconds: float) -> tuple[int, str]:
    """Run a command in the root of the source; its exit code, and its last line."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return 124, f"not done in {seconds:.0f} s"
    except OSError as error:
        return 127, str(error)
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    return done.returncode, lines[-1] if lines else ""


def make(row: Row, folder: Path, launch: Run) -> str:
    """Make the environment of a row; why there is none, empty if there is."""
    if (folder / "made").exists():
        return ""
    python = str(folder / "bin" / "python")
    commands = [row.python, "-m", "venv", str(folder)], [python, "-m", "pip", "install", "-q", *row.packages, *BESIDE]
    for command in commands:
        code, last = launch(command, SECONDS)
        if code:
            return last or f"exit code {code}"
    (folder / "made").touch()
    return ""


def examine(row: Row, folder: Path, launch: Run = run) -> dict[str, str]:
    """Return what each check says in the environment of a row, from an empty cell for "no environment"."""
    if absent := make(row, folder, launch):
        return dict.fromkeys(CHECKS, "") | {"import": f"not here: {absent[:100]}"}
    found = {}
    for name, arguments in CHECKS.items():
        began = time.monotonic()
        code, last = launch([str(folder / "bin" / "python"), *arguments], SECONDS)
        word = "ok" if code == 0 else "**failed**"
        found[name] = f"{word}, {time.monotonic() - began:.0f} s{f': {last[:100]}' if last else ''}"
    return found


def table(found: Mapping[str, Mapping[str, str]]) -> str:
    """Return a row for each environment."""
    lines = [f"| packages | {' | '.join(CHECKS)} |", f"|---|{'---|' * len(CHECKS)}"]
    for name, cells in found.items():
        told = " | ".join(cells[check].replace("|", "/") for check in CHECKS)
        lines.append(f"| {name}: {ROWS[name].title} | {told} |")
    return "\n".join(lines) + "\n"


def main(command: Sequence[str]) -> int:
    """Make the environments, check them, print the table; 1 if a check has failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.versions")
    parser.add_argument("folder", type=Path, help="where the environments are")
    parser.add_argument("--only", nargs="+", choices=[*ROWS], default=[*ROWS])
    parser.add_argument("--out", type=Path, help="a file for the table")
    given = parser.parse_args(command)
    found: dict[str, dict[str, str]] = {}
    for name in given.only:
        found[name] = examine(ROWS[name], given.folder.absolute() / name.replace(" ", "-"))
        print(f"{name}: {found[name]}", flush=True)
    if given.out is not None:
        given.out.write_text(table(found), encoding="utf-8")
    print(table(found))
    return int(any("failed" in cell for cells in found.values() for cell in cells.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
