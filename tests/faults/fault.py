"""A seeded fault: a small mistake in one product file, and the tests that have to notice it. Pure data, no torch."""

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One mistake that a developer could make, as a replacement of text."""

    name: str
    """A short name for the command line."""
    about: str
    """One sentence: what goes wrong for a user. It contains "hangs" if ranks then wait for each other forever."""
    file: str
    """The product file, from the source root."""
    old: str
    """Text that occurs exactly once in the file."""
    new: str
    tests: tuple[str, ...]
    """Test functions (``tests/zero/test_layout.py::test_name``) or files, the fastest first."""

    @property
    def hangs(self) -> bool:
        """A time limit is the expected end of its tests."""
        return "hangs" in self.about

    def patched(self, root: Path = ROOT) -> str:
        """The text of the file with the fault in it.

        Raises:
            LookupError: the file is missing there, or ``old`` does not occur in it exactly once.
        """
        path = root / self.file
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        if text.count(self.old) != 1:
            raise LookupError(
                f"{self.name}: its text occurs {text.count(self.old)} times in {self.file}, and must once."
            )
        return text.replace(self.old, self.new)

    def known_tests(self, root: Path = ROOT) -> tuple[str, ...]:
        """Those of its tests that exist below ``root``."""
        return tuple(test for test in self.tests if _exists(test, root))


def _exists(test: str, root: Path) -> bool:
    file, _, function = test.partition("::")
    if not (root / file).is_file():
        return False
    return not function or function.partition("[")[0] in functions_of(root / file)


@cache
def functions_of(path: Path) -> Mapping[str, ast.FunctionDef]:
    """Return the functions of a test file by name."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
