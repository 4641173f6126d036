"""``docs/errors.md``: every sentence that the product raises, read from its source.

``python -m tests.errors_page --write`` after a sentence has changed; a test compares. Values stand in braces, by the
name that they have in the code.
"""

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from tests.architecture_page import path_of
from tests.structure import ROOT, Structure

PAGE = ROOT / "docs" / "errors.md"
SECTIONS: Mapping[str, tuple[str, str]] = {
    "ConfigError": ("The configuration", "Each begins with the path of its key; all problems of a file come at once."),
    "GridError": ("Ranks and groups", "Processes cannot find each other, or do not fit the grid."),
    "PlanError": ("The model", "Model, example and configuration do not fit together."),
    "NoRuleError": ("What the tensor plan cannot follow", "They end a note or an error about the tensor plan."),
    "ScheduleError": ("Pipeline schedules", "Also what is wrong with a schedule file."),
    "EngineError": ("A running engine", "Batches, losses, and calls in the wrong place or order."),
    "LaunchError": ("Starting a job", "`trine launch` says them before anything is started; all of them come at once."),
    "CorruptionError": ("Silent corruption", "Bits that changed by themselves, and copies that differ."),
    "CheckpointError": ("Checkpoints", "Missing, damaged, of another model, or locked."),
}
"""Public errors and their subjects; other classes of the product are listed with the base they have, or as reasons."""
REASONS = ("Reasons", "They become the end of one of the sentences above, or are handled by the engine.")
MOST = 110
"""Characters of an expression that stands for a value."""


class Sentence(NamedTuple):
    """A message as the source has it."""

    kind: str
    """Name of the error class."""
    text: str
    module: str


@dataclass(frozen=True, slots=True)
class _Scope:
    """What names stand for around a message."""

    function: ast.AST | None
    tree: ast.Module

    def texts(self, node: ast.expr, depth: int = 3) -> list[str]:
        """Every text that an expression may stand for."""
        match node:
            case ast.Constant(value=str() as text):
                return [text]
            case ast.JoinedStr(values=parts):
                return ["".join(self._part(part) for part in parts)]
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return [a + b for a in self.texts(left, depth) for b in self.texts(right, depth)]
            case ast.IfExp(body=body, orelse=other):
                return self.texts(body, depth) + self.texts(other, depth)
            case ast.Call(func=ast.Attribute(value=ast.Constant(value=str() as text), attr="format")):
                return [text]
        found = self._behind(node) if depth else []
        return [text for value in found for text in self.texts(value, depth - 1)] or ["{" + _short(node) + "}"]

    def _behind(self, node: ast.expr) -> list[ast.expr]:
        """What a function of this file returns, what a name was given, or what a table holds."""
        match node:
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
                return self._returns(name)
            case ast.Name(id=name):
                return self._assigned(name)
            case ast.Subscript(value=ast.Name(id=name)):
                tables = [table for table in self._assigned(name) if isinstance(table, ast.Dict)]
                return [value for table in tables for value in table.values]
        return []

    def _part(self, part: ast.expr) -> str:
        if isinstance(part, ast.FormattedValue):
            return "{" + _short(part.value) + "}"
        return str(part.value) if isinstance(part, ast.Constant) else ""

    def _returns(self, name: str) -> list[ast.expr]:
        return [
            node.value
            for function in ast.walk(self.tree)
            if isinstance(function, ast.FunctionDef) and function.name == name
            for node in ast.walk(function)
            if isinstance(node, ast.Return) and node.value is not None
        ]

    def _assigned(self, name: str) -> list[ast.expr]:
        for scope in (self.function, self.tree):
            found = [
                node.value
                for node in (ast.walk(scope) if scope is self.function and scope else self.tree.body)
                if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None
                for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
                if isinstance(target, ast.Name) and target.id == name
            ]
            if found:
                return found
        return []


def _short(node: ast.expr) -> str:
    match node:
        case ast.Call(func=ast.Attribute(value=ast.Constant(), attr="join"), args=[inner]):
            return _short(inner) + ", ..."
        case ast.Call(func=ast.Name(id="str" | "repr" | "sorted" | "list" | "map"), args=[*_, inner]):
            return _short(inner)
        case ast.GeneratorExp(elt=element) | ast.ListComp(elt=element):
            return _short(element)
    text = ast.unparse(node).replace("self.", "").replace(".__name__", "").replace("_", " ").strip()
    return text if len(text) <= MOST else text[:MOST] + " ..."


def sentences(structure: Structure) -> Iterator[Sentence]:
    """Every message of an error class of the product, and every problem of a configuration."""
    for module, tree in structure.trees.items():
        for function, call in _calls(tree):
            kind, message = _message(call)
            if message is None:
                continue
            for text in _Scope(function, tree).texts(message):
                if re.search(r"[a-z]{3}", re.sub(r"\{.*?\}", "", text)) and not text.startswith("{["):
                    yield Sentence(kind, " ".join(text.split()), module)


def _calls(tree: ast.Module) -> Iterator[tuple[ast.AST | None, ast.Call]]:
    def walk(node: ast.AST, function: ast.AST | None) -> Iterator[tuple[ast.AST | None, ast.Call]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Call):
                yield function, child
            yield from walk(child, child if isinstance(child, ast.FunctionDef) else function)

    return walk(tree, None)


def _message(call: ast.Call) -> tuple[str, ast.expr | None]:
    name = call.func.id if isinstance(call.func, ast.Name) else ""
    if name.endswith("Error") and call.args:
        own = name in SECTIONS or name.startswith("_") or name in ("RefusedError", "NeedsContentError", "SequenceError")
        return name, call.args[0] if own and not isinstance(call.args[0], ast.Starred) else None
    if isinstance(call.func, ast.Attribute) and call.func.attr == "add" and len(call.args) == 2:
        owner = ast.unparse(call.func.value)
        if "problems" in owner and not isinstance(call.args[0], ast.Starred):
            return "ConfigError", call.args[1]
    return name, None


def page(structure: Structure) -> str:
    """The text of the page."""
    found: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for sentence in sentences(structure):
        kind = sentence.kind if sentence.kind in SECTIONS else "reasons"
        found[kind][sentence.text].add(_place(sentence.module))
    total = sum(map(len, found.values()))
    lines = [
        "# Errors",
        "",
        f"Every sentence that Trine raises, {total} of them, read from the source by `python -m tests.errors_page "
        "--write`. Values stand in braces. Each error is an `engine.EngineError`; what was given comes first, then the "
        "rule, then what to do.",
    ]
    for kind, (title, about) in {**SECTIONS, "reasons": REASONS}.items():
        lines += ["", f"## {title}", "", f"`{kind}`. {about}" if kind in SECTIONS else about, ""]
        for text, places in sorted(found[kind].items()):
            lines.append(f"- {_escaped(text)} <sub>{', '.join(sorted(places))}</sub>")
    return "\n".join(lines) + "\n"


def _place(module: str) -> str:
    folder, _, name = module.rpartition(".")
    return f"{path_of(folder)}/{name}"


def _escaped(text: str) -> str:
    return re.sub(r"([*_<>|])", r"\\\1", text)


if __name__ == "__main__" and "--write" in sys.argv:
    PAGE.write_text(page(Structure()), encoding="utf-8")
