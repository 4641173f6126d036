"""The generated parts of ``docs/architecture.md``: every room with its files, and the figures of the structure.

``python -m tests.architecture_page --write`` after files have moved; a test compares.
"""

import ast
import re
import sys
from collections.abc import Iterator

from tests.structure import LAYERS, ROOT, Structure, table

PAGE = ROOT / "docs" / "architecture.md"
BEFORE = {
    "product files (folder docstrings and doors apart)": "265 (+ 10)",
    "lines": 36552,
    "most files in a folder": 65,
    "rooms / floors / arrows of engine": "66 / 23 / 253",
    "rooms / floors / arrows of engine.zero": "18 / 6 / 31",
    "rooms / floors / arrows of engine.parallel": "12 / 5 / 18",
    "rooms / floors / arrows of engine.parallel.tensor": "40 / 11 / 130",
    "rooms / floors / arrows of engine.parallel.pipeline": "44 / 7 / 84",
    "file cycles": "one of 17 files",
    "folder cycles": "of 2, 3 and 2 folders",
    "files with one importer": 87,
    "of those under 60 lines": 23,
    "public names that stand twice": 52,
}
"""The same figures of version 0.1.0, by the same script."""


def sections(structure: Structure) -> dict[str, str]:
    """Marker -> text between its pair."""
    return {"rooms": "\n".join(_rooms(structure)), "figures": "\n".join(_figures(structure))}


def _figures(structure: Structure) -> Iterator[str]:
    yield "| | version 0.1.0 | now |"
    yield "|---|---|---|"
    for what, figure in table(structure):
        yield f"| {what} | {BEFORE[what]} | {figure if figure != [] else 'none'} |"


def _rooms(structure: Structure) -> Iterator[str]:
    folders = sorted({structure.folder(module) for module in structure.files} | {"engine.kernels"}, key=_place)
    for folder in folders:
        own = [module for module in structure.files if module != folder and module.rpartition(".")[0] == folder]
        files = [module for module in own if module not in structure.packages]
        if not files:
            continue
        about = _first_line(structure.trees[folder]) if folder in structure.files else ""
        yield f"### {path_of(folder)}/"
        yield ""
        if about:
            yield from (about, "")
        yield "| file | |"
        yield "|---|---|"
        for module in files:
            yield f"| `{module.rpartition('.')[2]}` | {_first_line(structure.trees[module])} |"
        yield ""


def _place(folder: str) -> tuple[int, str]:
    parts = folder.split(".")
    layer = parts[1] if len(parts) > 1 and parts[1] in LAYERS else "engine"
    return -LAYERS.index(layer), folder


def path_of(folder: str) -> str:
    parts = folder.split(".")
    return "/".join(parts[1:] if len(parts) > 1 and parts[1] in LAYERS and parts[1] != "engine" else parts)


def _first_line(tree: ast.Module) -> str:
    paragraph = (ast.get_docstring(tree) or "").split("\n\n")[0]
    return " ".join(paragraph.split()).replace("|", "\\|")


def rendered(text: str, structure: Structure) -> str:
    """``text`` with its generated parts as the code has them now."""
    for marker, body in sections(structure).items():
        pattern = rf"(<!-- {marker} -->\n).*?(<!-- /{marker} -->)"
        text = re.sub(pattern, lambda found: f"{found[1]}{body}\n{found[2]}", text, flags=re.DOTALL)  # noqa: B023
    return text


if __name__ == "__main__" and "--write" in sys.argv:
    PAGE.write_text(rendered(PAGE.read_text(encoding="utf-8"), Structure()), encoding="utf-8")
