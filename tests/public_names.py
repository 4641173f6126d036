"""The public names of the product, read from its source: nothing is imported, so other libraries may be missing."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from tests.structure import product

PUBLIC = (
    "engine", "engine.verify", "engine.data", "engine.generation", "engine.deepspeed", "engine.huggingface",
    "engine.lightning",
    "engine.parallel.tensor",
)  # fmt: skip
"""Modules whose public names users import."""
WITH_MEMBERS = ("engine.Engine", "engine.StepReport")
"""Classes whose members are names of their own."""
Definition = ast.FunctionDef | ast.ClassDef


class PublicName(NamedTuple):
    """A class, a function or a member that a user may name."""

    path: str
    arguments: tuple[str, ...] | None
    """Of a function; None for anything else."""
    sentence: str
    """The first of its docstring."""


def public_names(module: str) -> Iterator[PublicName]:
    """Yield the public names of ``module``; modules and values among them are left out."""
    tree = _tree(module)
    for name in _listed(tree) or [node.name for node in tree.body if isinstance(node, Definition)]:
        found = _definition(module, name)
        if found is None or name.startswith("_"):
            continue
        home, node = found
        yield _public(f"{module}.{name}", node)
        if f"{module}.{name}" in WITH_MEMBERS and isinstance(node, ast.ClassDef):
            yield from sorted(_members(f"{module}.{name}", home, node))


def shown(name: PublicName) -> str:
    """Return the path inside its module, and the arguments of a function."""
    home = max((module for module in PUBLIC if name.path.startswith(f"{module}.")), key=len)
    path = name.path.removeprefix(f"{home}.")
    return path if name.arguments is None else f"{path}({', '.join(name.arguments)})"


def defines(module: str, name: str) -> bool:
    """Return whether ``module`` has ``name``: a definition, a value, an import, or a module below it."""
    files = product().files
    if module not in files:
        return False
    top = {one for node in _tree(module).body for one in _bound(node)}
    return name in top or f"{module}.{name}" in files or name in _listed(_tree(module))


def _bound(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, Definition):
        yield node.name
    elif isinstance(node, ast.ImportFrom | ast.Import):
        yield from (alias.asname or alias.name for alias in node.names)
    elif isinstance(node, ast.Assign | ast.AnnAssign):
        yield from (ast.unparse(one) for one in (node.targets if isinstance(node, ast.Assign) else [node.target]))
    elif isinstance(node, ast.If):
        yield from (name for inner in node.body for name in _bound(inner))


@cache
def _tree(module: str) -> ast.Module:
    return ast.parse(product().files[module].read_text(encoding="utf-8"))


def _listed(tree: ast.Module) -> list[str]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    return []


def _definition(module: str, name: str) -> tuple[str, Definition] | None:
    """Return the module that defines ``name``, and the definition; imports are followed."""
    if module not in product().files:
        return None
    for node in ast.walk(_tree(module)):
        if isinstance(node, Definition) and node.name == name and node in _tree(module).body:
            return module, node
        if isinstance(node, ast.ImportFrom) and name in [alias.asname or alias.name for alias in node.names]:
            return _definition(node.module or "", name) if node.module != module else None
    return _definition("engine.errors", name) if module == "engine" else None


def _members(path: str, module: str, node: ast.ClassDef) -> Iterator[PublicName]:
    for base in node.bases:
        if found := _definition(module, ast.unparse(base).partition("[")[0]):
            home, parent = found
            if isinstance(parent, ast.ClassDef):
                yield from _members(path, home, parent)
    for at, member in enumerate(node.body):
        if isinstance(member, ast.FunctionDef) and not member.name.startswith("_"):
            marks = [ast.unparse(mark) for mark in member.decorator_list]
            if not any(mark.endswith(".setter") or "abstract" in mark for mark in marks):
                yield _public(f"{path}.{member.name}", member, "property" in marks)
        elif isinstance(member, ast.AnnAssign) and not ast.unparse(member.target).startswith("_"):
            following = node.body[at + 1] if at + 1 < len(node.body) else None
            yield PublicName(f"{path}.{ast.unparse(member.target)}", None, first_sentence(_text(following)))


def _public(path: str, node: Definition, plain: bool = False) -> PublicName:
    sentence = first_sentence(ast.get_docstring(node) or "")
    if isinstance(node, ast.ClassDef) or plain:
        return PublicName(path, None, sentence)
    given = node.args
    names = [one.arg for one in (*given.posonlyargs, *given.args)]
    names += [f"*{given.vararg.arg}"] if given.vararg else []
    names += [one.arg for one in given.kwonlyargs] + ([f"**{given.kwarg.arg}"] if given.kwarg else [])
    return PublicName(path, tuple(name for name in names if name != "self"), sentence)


def _text(node: ast.stmt | None) -> str:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return node.value.value
    return ""


def first_sentence(text: str) -> str:
    """Return the first sentence of a docstring, without Sphinx's roles."""
    first = " ".join(text.split("\n\n")[0].split())
    return re.sub(r"(?<=[.!?]) [A-Z(`].*", "", re.sub(r":\w+:`~?([^`]*)`", r"`\1`", first))
