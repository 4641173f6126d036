"""The structure of the product as figures, read from its imports and definitions: ``python -m tests.structure [ROOT]``.

room        a file or folder directly inside a folder
arrow       an import from one room of a folder to another
floor       the longest chain of arrows through a folder, counted in rooms
crumb       a file of fewer than 60 lines with one importer, which could live in that importer
"""

import ast
import gc
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, cached_property
from pathlib import Path
from typing import NamedTuple

from engine.launch.raised_errors import RaisedError, raised_errors

ROOT = Path(__file__).parents[1]
LAYERS = ("kernels", "parallel", "zero", "engine", "launch")
"""Lowest first; a layer imports from itself and from those before it."""
CRUMB_LINES = 60

Graph = Mapping[str, frozenset[str]]


class Definition(NamedTuple):
    """A class or function at the top of a module."""

    name: str
    module: str


class Source(NamedTuple):
    """A file, parsed."""

    name: str
    """Its path below the root."""
    tree: ast.Module
    nodes: tuple[ast.AST, ...]
    """All of ``tree``."""


def source_of(path: Path, tree: ast.Module | None = None) -> Source:
    """The file at ``path``, of which ``tree`` may be known."""
    tree = tree or ast.parse(path.read_text(encoding="utf-8"))
    return Source(path.relative_to(ROOT).as_posix(), tree, tuple(ast.walk(tree)))


def last_name(node: ast.expr) -> str:
    """The last word of a dotted name, empty for any other expression: cheaper than to write the expression out."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """All statements below a node; without their expressions, which are ten times as many."""
    for kind in ("body", "handlers", "orelse", "finalbody", "cases"):
        for child in getattr(node, kind, ()):
            yield child
            yield from statements(child)


class Structure:
    """The product files below a root, by module name as imports say it (``engine.parallel.grid``)."""

    def __init__(self, root: Path = ROOT) -> None:
        self.files = dict(sorted(_modules(root)))

    @cached_property
    def trees(self) -> Mapping[str, ast.Module]:
        """The source of each module, parsed once it is asked for: that is most of the work.

        The trees stay, and a million objects make Python look for garbage for three times as long as it parses.
        """
        collecting = gc.isenabled()
        gc.disable()
        try:
            return {module: ast.parse(path.read_text(encoding="utf-8")) for module, path in self.files.items()}
        finally:
            if collecting:
                gc.enable()

    def lines(self, module: str) -> int:
        """Lines of its file."""
        return len(self.files[module].read_text(encoding="utf-8").splitlines())

    @cached_property
    def packages(self) -> frozenset[str]:
        """Modules that are the ``__init__.py`` of a folder."""
        return frozenset(module for module, path in self.files.items() if path.name == "__init__.py")

    @cached_property
    def imports(self) -> Graph:
        """What each module imports of the product, also inside functions and for types alone."""
        return {module: frozenset(self._imported(module)) for module in self.files}

    def _imported(self, module: str) -> Iterator[str]:
        for node in statements(self.trees[module]):
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    whole = f"{node.module}.{alias.name}"
                    target = whole if whole in self.files else node.module or ""
                    if target in self.files and target != module:
                        yield target
            elif isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names if alias.name in self.files and alias.name != module)

    @cached_property
    def importers(self) -> Graph:
        """Who imports each module."""
        found: dict[str, set[str]] = {module: set() for module in self.files}
        for module, targets in self.imports.items():
            for target in targets:
                found[target].add(module)
        return {module: frozenset(names) for module, names in found.items()}

    def folder(self, module: str) -> str:
        """The package that a module lies in, or is."""
        return module if module in self.packages else module.rpartition(".")[0]

    @cached_property
    def folders(self) -> Graph:
        """Imports between folders; a door (``__init__.py``) may name what is inside it."""
        found: dict[str, set[str]] = defaultdict(set)
        for module, targets in self.imports.items():
            own = self.folder(module)
            for target in targets:
                other = self.folder(target)
                inside = module in self.packages and other.startswith(f"{own}.")
                if other != own and not inside and target not in ("engine.errors", "engine"):
                    found[own].add(other)
        return {folder: frozenset(others) for folder, others in found.items()}

    def rooms(self, folder: str) -> dict[str, frozenset[str]]:
        """The rooms of a folder and their arrows."""
        arrows: dict[str, set[str]] = {}
        for module, targets in self.imports.items():
            if (own := _room(module, folder)) is None:
                continue
            found = arrows.setdefault(own, set())
            found |= {room for target in targets if (room := _room(target, folder)) not in (None, own)}
        return {room: frozenset(others) for room, others in arrows.items()}

    def definitions(self) -> Iterator[Definition]:
        """Public classes and functions."""
        for module, tree in self.trees.items():
            for node in tree.body:
                if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                    yield Definition(node.name, module)

    def duplicate_names(self) -> dict[str, list[str]]:
        """Public names with more than one home."""
        homes: dict[str, list[str]] = defaultdict(list)
        for name, module in self.definitions():
            homes[name].append(module)
        return {name: modules for name, modules in sorted(homes.items()) if len(modules) > 1}

    def single_importer(self) -> list[str]:
        """Modules, doors left out, that exactly one module imports."""
        return [m for m in self.files if m not in self.packages and len(self.importers[m]) == 1]

    def crumbs(self) -> list[str]:
        """Small files that exist for one importer."""
        return [module for module in self.single_importer() if self.lines(module) < CRUMB_LINES]


def path_of(folder: str) -> str:
    """Path of a folder below the root, from its name in imports."""
    parts = folder.split(".")
    return "/".join(parts[1:] if len(parts) > 1 and parts[1] in LAYERS and parts[1] != "engine" else parts)


@cache
def product() -> Structure:
    """Return the structure of this tree; the tests of a process share its parsed files."""
    return Structure()


@cache
def raised_by_the_product() -> tuple[RaisedError, ...]:
    """Return every error message in the sources; to read them takes two seconds."""
    return tuple(raised_errors())


def _modules(root: Path) -> Iterator[tuple[str, Path]]:
    for layer in LAYERS:
        for path in (root / layer).rglob("*.py"):
            if path.resolve() != root.resolve() / path.relative_to(root):
                continue  # reached through a link in engine/
            parts = path.relative_to(root).with_suffix("").parts
            parts = parts if parts[0] == "engine" else ("engine", *parts)
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def _room(module: str, folder: str) -> str | None:
    inside = module.removeprefix(f"{folder}.")
    layered = folder == "engine" and inside.split(".")[0] in LAYERS and inside.split(".")[0] != "engine"
    return None if inside == module or layered else inside.split(".")[0]


def cycles(graph: Graph) -> list[list[str]]:
    """Sets of two or more nodes that reach each other (Tarjan 1972), each sorted."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        order[node] = low[node] = len(order)
        stack.append(node)
        for other in sorted(graph.get(node, ())):
            if other not in order:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], order[other])
        if low[node] == order[node]:
            members = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(members) > 1:
                found.append(sorted(members))

    for node in sorted(graph):
        if node not in order:
            visit(node)
    return found


def floors(rooms: Graph) -> int:
    """Rooms on the longest chain of arrows; rooms of a cycle share a floor."""
    together = {member: members[0] for members in cycles(rooms) for member in members}
    leads: dict[str, set[str]] = defaultdict(set)
    for room, others in rooms.items():
        leads[together.get(room, room)] |= {together.get(other, other) for other in others}
    heights: dict[str, int] = {}

    def height(room: str) -> int:
        if room not in heights:
            heights[room] = 1 + max((height(other) for other in leads[room] if other != room), default=0)
        return heights[room]

    return max(map(height, list(leads)), default=0)


def table(structure: Structure) -> Iterator[tuple[str, object]]:
    """(what is measured, its figure)."""
    modules = [module for module in structure.files if module not in structure.packages]
    doors = len(structure.files) - len(modules)
    yield "product files (folder docstrings and doors apart)", f"{len(modules)} (+ {doors})"
    yield "lines", sum(map(structure.lines, structure.files))
    yield "most files in a folder", max(_per_folder(structure).values())
    for folder in ("engine", "engine.zero", "engine.parallel", "engine.parallel.tensor", "engine.parallel.pipeline"):
        rooms = structure.rooms(folder)
        arrows = sum(map(len, rooms.values()))
        yield f"rooms / floors / arrows of {folder}", f"{len(rooms)} / {floors(rooms)} / {arrows}"
    yield "file cycles", [len(members) for members in cycles(structure.imports)]
    yield "folder cycles", [len(members) for members in cycles(structure.folders)]
    yield "files with one importer", len(structure.single_importer())
    yield "of those under 60 lines", len(structure.crumbs())
    yield "public names that stand twice", len(structure.duplicate_names())


def _per_folder(structure: Structure) -> Mapping[str, int]:
    count: dict[str, int] = defaultdict(int)
    for path in structure.files.values():
        count[str(path.parent)] += 1
    return count


def main(arguments: Iterable[str]) -> None:
    """Print the figures of a tree."""
    for what, figure in table(Structure(Path(next(iter(arguments), str(ROOT))))):
        print(f"{what}: {figure}")


if __name__ == "__main__":
    main(sys.argv[1:])
